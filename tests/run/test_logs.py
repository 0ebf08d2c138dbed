"""Errors and last lines in log files."""

from pathlib import Path

from tiltyard.run.logs import last_error, last_line


def test_last_error_is_that_of_the_newest_process(tmp_path: Path) -> None:
    log = tmp_path / "0001.log"
    assert last_error(log) == "", "the file does not exist yet"
    log.write_text("error: out of luck\nhint: try again\n")
    assert last_error(log) == "out of luck"
    before = log.stat().st_size
    with log.open("a") as file:
        file.write("something that is no error: at all\n")
    assert last_error(log, before) == "", "an error of an earlier command is ignored"
    with log.open("a") as file:
        file.write("error: first\nerror: last\nbye\n")
    assert last_error(log, before) == "last" and last_line(log) == "bye"
