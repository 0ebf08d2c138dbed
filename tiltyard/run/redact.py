"""Mask everything that looks like a secret in text before it is written; prefers masking too much.

shapes        ghp_..., hf_..., sk-..., AKIA..., xoxb-..., JWTs, private key blocks
places        password=..., "api_key": "...", Authorization: ..., user:pass@ in addresses, --token VALUE
environment   the value of every variable with a name like a secret's, anywhere in the text
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

MASK = "***"
# Shorter values are words like `yes` and `1`, which occur everywhere.
SHORTEST = 6
FOLDERS = ("PWD", "OLDPWD")  # the shell's working folder, not a password

# Every repetition below has a bound, so that a megabyte of any text is scanned fast.
_SECRET_WORDS = (
    r"(?:passw(?:or)?d|passphrase|secret|token(?!i[sz])|(?:api|access|private|auth|license)[_-]?key|credential|jwt"
    r"|(?<![a-z])(?:pass|pwd)(?![a-z]))"
)
_SECRET_NAME = re.compile(rf"(?i){_SECRET_WORDS}|(?:^|[_.-])(?:key|pw|auth)(?:$|[_.-])")

_SHAPES = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{30,}"
    r"|[spr]k[-_][A-Za-z0-9_-]{16,}|A(?:KIA|SIA|BIA|CCA)[0-9A-Z]{16}|xox[a-z]-[\w-]{8,}|AIza[\w-]{30,}"
    r"|wandb_v\d_\w{16,}|pypi-[\w-]{16,}|eyJ[\w-]{8,2000}\.[\w-]{8,}(?:\.[\w-]*)?)"
)
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----|\Z)",
    re.S,
)
# A line from the middle of a key block, which may be all that a diff shows: only base64.
_KEY_LINE = re.compile(r"(?m)^([ +-]?)[A-Za-z0-9+/]{64}$")
_USERINFO = re.compile(r"://[^/\s\"'<>]{1,300}@")
_AUTHORIZATION = re.compile(
    r"(?i)(authorization[\"']?[ \t]{0,8}[:=][ \t]{0,8}[\"']?(?:(?:basic|bearer|token|digest)[ \t]{1,8})?)[^\s\"']+"
)
_BEARER = re.compile(r"(?i)\b(bearer[ \t]{1,8})[\w.~+/=-]{8,}")
_HEX_KEY = re.compile(r"(?i)((?:wandb|key|token|login)[^\n]{0,40}?)\b[0-9a-f]{40}\b")
_ASSIGNED = re.compile(
    rf"(?i)({_SECRET_WORDS}[\w.-]{{0,60}}[\"']?\]?[ \t]{{0,8}}(?::=|=>|[:=])[ \t]{{0,8}})"
    r"(\"(?:\\.|[^\"\\\n]){0,2000}\"|'(?:\\.|[^'\\\n]){0,2000}'|\S+)"
)
_FLAG = re.compile(rf"(?i)((?:^|\s)--?[\w-]{{0,40}}?(?:{_SECRET_WORDS}|-key)[\w-]{{0,40}}[ \t]{{1,8}})([^\s-]\S*)")
_NO_SECRET = re.compile(r"(?i)[\"']?(?:none|null|true|false|str|int|bool|float|bytes|any|object)?[\"']?[,;)}\]]*")


def looks_secret(name: str) -> bool:
    """Whether the name of a variable or option sounds like a secret."""
    return _SECRET_NAME.search(name) is not None


def mask_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with everything that looks like a secret replaced by ***."""
    for value in _secret_values(os.environ if environment is None else environment):
        text = text.replace(value, MASK)
    text = _KEY_BLOCK.sub(MASK, text)
    text = _KEY_LINE.sub(rf"\1{MASK}", text)
    text = _AUTHORIZATION.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    text = _USERINFO.sub(f"://{MASK}@", text)
    text = _SHAPES.sub(MASK, text)
    text = _HEX_KEY.sub(rf"\1{MASK}", text)
    text = _FLAG.sub(rf"\1{MASK}", text)
    return _ASSIGNED.sub(_mask_assigned, text)


def _mask_assigned(match: re.Match[str]) -> str:
    """Mask the value of a name like a secret's, except for types and constants (`token: None`, `password: str`)."""
    value = match[2]
    return match[0] if _NO_SECRET.fullmatch(value) or MASK in value else match[1] + MASK


def _secret_values(environment: Mapping[str, str]) -> list[str]:
    """Secret values of the environment, longest first, because one may contain another."""
    found: set[str] = set()
    for name, value in environment.items():
        if looks_secret(name) and name not in FOLDERS:
            # A diff shows a key of several lines line by line; a URL has it percent-encoded.
            parts = {value, value.strip(), quote(value, safe=""), *(line.strip() for line in value.splitlines())}
            found |= {part for part in parts if len(part) >= SHORTEST}
    return sorted(found, key=lambda value: (-len(value), value))


def mode_for(*contents: Any) -> int:
    """The mode of a new file: for this user alone if one of its contents, JSON-like or text, has a secret."""
    return 0o600 if any(mask_all(content) != content for content in contents) else 0o666


def mask_command(words: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Mask a command line, where a secret may be the word after its option."""
    masked: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        after_option = (
            before.startswith("-") and "=" not in before and looks_secret(before) and not word.startswith("--")
        )
        masked.append(MASK if after_option else mask_secrets(word, environment))
    return masked


def mask_all(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Mask every string in a JSON-like value; in dictionaries also by the key."""
    if isinstance(value, str):
        return mask_secrets(value, environment)
    if isinstance(value, list):
        return [mask_all(inner, environment) for inner in value]
    if isinstance(value, dict):
        return {
            key: MASK if isinstance(inner, str) and inner and looks_secret(key) else mask_all(inner, environment)
            for key, inner in value.items()
        }
    return value
