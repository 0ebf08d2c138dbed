"""Which envs there are, by family: those that are installed with their ids, and those that an extra would add."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tiltyard.envs.builtin import BUILTIN_ENVS
from tiltyard.envs.suites.registered import import_package, prepare_display

_PETTINGZOO = ("classic", "sisl", "butterfly")


@dataclass(frozen=True)
class Family:
    """A family of envs. `form` shows how its ids are written, where they cannot be listed."""

    name: str
    title: str
    form: str
    extra: str | None
    installed: bool
    ids: tuple[str, ...]

    def is_named(self, pattern: str | None) -> bool:
        return pattern is None or pattern.lower() in f"{self.name} {self.title} {self.form}".lower()

    def matching(self, pattern: str | None) -> Family:
        """The family with the ids that contain the pattern (match it, if it has a *), or all if it is its name."""
        if pattern is None or pattern.lower() == self.name:
            return self
        word = pattern.lower() if "*" in pattern else f"*{pattern.lower()}*"
        return replace(self, ids=tuple(name for name in self.ids if fnmatch.fnmatchcase(name.lower(), word)))


def families() -> list[Family]:
    """All families, in the order of the guide."""
    prepare_display()
    return [
        Family("toy", "toy envs that come with Tiltyard", "identity", None, True, tuple(BUILTIN_ENVS)),
        _family("classic", "Gymnasium's classic control", "CartPole-v1", None, None, _registered("classic_control")),
        _family("text", "Gymnasium's toy texts", "FrozenLake-v1", None, None, _registered("toy_text")),
        _family("box2d", "Gymnasium's Box2D envs", "LunarLander-v3", "Box2D", "box2d", _registered("box2d")),
        _family("mujoco", "Gymnasium's MuJoCo robots", "HalfCheetah-v5", "mujoco", "mujoco", _registered("mujoco")),
        _family("minigrid", "MiniGrid and BabyAI", "MiniGrid-NAME-v0", "minigrid", "minigrid", _minigrid),
        _family("atari", "Atari games (also ALE/NAME-v5)", "atari:NAME", "ale_py", "atari", _atari),
        _family("car-racing", "CarRacing, drawn fast", "car-racing:fast", "numba", "car-racing", _car_racing),
        _family("doom", "ViZDoom's scenarios", "doom:NAME", "vizdoom", "vizdoom", _doom),
        _family("pettingzoo", "PettingZoo", "pettingzoo.PART.NAME:env", "pettingzoo", "pettingzoo", _pettingzoo),
        _family("envpool", "EnvPool", "envpool:NAME", "envpool", "envpool", _envpool),
    ]


def _family(
    name: str, title: str, form: str, package: str | None, extra: str | None, ids: Callable[[], Iterator[str]]
) -> Family:
    installed = package is None or importlib.util.find_spec(package) is not None
    return Family(name, title, form, extra, installed, tuple(ids()) if installed else ())


def _registered(part: str) -> Callable[[], Iterator[str]]:
    """The newest version of every id that Gymnasium's own package registers."""

    def ids() -> Iterator[str]:
        import gymnasium

        newest: dict[str, tuple[int, str]] = {}
        for name, entry in gymnasium.registry.items():
            if str(entry.entry_point).startswith(f"gymnasium.envs.{part}"):
                stem, version = name.rsplit("-v", 1)
                newest[stem] = max(newest.get(stem, (-1, "")), (int(version), name))
        return iter(name for _, name in newest.values())

    return ids


def _minigrid() -> Iterator[str]:
    import gymnasium

    import_package("MiniGrid-")
    return iter([name for name in gymnasium.registry if name.startswith(("MiniGrid-", "BabyAI-"))])


def _atari() -> Iterator[str]:
    from ale_py import roms

    return (f"atari:{name}" for name in roms.get_all_rom_ids())


def _car_racing() -> Iterator[str]:
    return iter(("car-racing:fast", "car-racing:official"))  # importing its file would import numba


def _doom() -> Iterator[str]:
    from tiltyard.envs.suites.vizdoom import scenarios

    return (f"doom:{name}" for name in scenarios())


def _pettingzoo() -> Iterator[str]:
    for part in _PETTINGZOO:
        package = importlib.import_module(f"pettingzoo.{part}")
        names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
        yield from (f"pettingzoo.{part}.{name}:env" for name in names if re.search(r"_v\d+$", name))


def _envpool() -> Iterator[str]:
    import envpool

    return (f"envpool:{name}" for name in envpool.list_all_envs())
