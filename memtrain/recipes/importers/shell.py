"""A shell script as far as a paste needs it: its commands as words, with what is set before them in place.

Read, and never run: variables with their defaults, arithmetic, arrays, `if` and `case` on what is known. What
is not known (a file test, the output of a program, an argument of the script) stays as it is written.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

MOST_OPEN = 10_000
"""Letters of one command that its quotes may leave open, and of a value. Taste."""
MOST_INSIDE = 40
"""Expansions inside of one another. Taste."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPEN = re.compile(r"`|\$(?:\(|\{\w+(?![\w.])|[A-Za-z_0-9#?!@*])")
_ALL_OF = re.compile(r'"\$\{(\w+)\[@\]\}"')
_CONTROL = re.compile(r"(if|elif|else|fi|for|while|until|do|done|case|esac|then|[{}])(?=\s|$)|[()](?!\()")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_REDIRECTS = re.compile(r"(\d*|&)(>>?|<)(&?\d|[^&].*)?")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a script."""

    words: list[str]
    known: dict[str, str]
    """The variables that were set before it."""
    branch: str = ""
    """The condition that it depends on, where that is not known."""


@dataclass(slots=True)
class _Frame:
    """An `if`, a `case`, a loop or a function that is open. `runs`: None where it is not known."""

    kind: str
    runs: bool | None = True
    taken: bool | None = False
    """Whether an earlier branch ran."""
    words: str = ""
    subject: str | None = None
    """Of `case`: the word that patterns are compared with; None where it is not known."""
    wants_pattern: bool = False
    patterns: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class _Shell:
    known: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    frames: list[_Frame] = field(default_factory=list[_Frame])
    asked: list[str] | None = None
    """Parts of a condition whose `then` is still to come."""

    @property
    def runs(self) -> bool | None:
        """Whether this place is reached: None where it is not known."""
        return _all_of([frame.runs for frame in self.frames])

    @property
    def branch(self) -> str:
        return next((frame.words for frame in self.frames if frame.runs is None), "")


def commands(text: str) -> Iterator[Command]:
    """Each command that may run, in its order.

    A variable that the script does not set is the environment's, as in the shell; one that nothing sets
    stays as it is written. A log of `set -x` is read without its marks. Raises: ValueError where quotes of a
    command do not close.
    """
    shell = _Shell({"HOME": str(Path.home())})
    for line in _whole_lines(_without_documents(re.sub(r"\\[ \t]*\n", " ", text))):
        line = re.sub(r"^\s*\++ ", "", line).strip()
        status: bool | None = True
        for mark, part in _parts(line):
            if mark == ";;" and shell.frames and shell.frames[-1].kind == "case":
                shell.frames[-1].wants_pattern = True
            reached = {"&&": status, "||": None if status is None else not status}.get(mark, True)
            found, status, ends = _step(shell, part, reached)
            if found is not None:
                yield found
            if ends:
                return


def _step(shell: _Shell, part: str, reached: bool | None) -> tuple[Command | None, bool | None, bool]:
    """(the command of a part, its status where that is known, whether the script ends here)."""
    part = _controls(shell, part.strip())
    if not part or shell.asked is not None:
        return None, True, False
    runs = _all_of([shell.runs, reached])
    if runs is False:
        return None, False, False
    words = words_of(part, shell)
    if not words:
        return None, True, False
    if words[0] in ("exit", "return") and runs and words[0] == "exit":
        return None, True, True
    if words[0] in ("[", "[[", "test", "((", "true", "false", "!"):
        return None, _truth(words, shell), False
    if _assigns(shell, part, words, is_sure=runs is True):
        return None, True, False
    where = shell.branch or ("" if runs else part)
    return Command(words, dict(shell.known), "" if runs else where), True, False


def _controls(shell: _Shell, part: str) -> str:
    """Take the words of control away from the beginning of a part, and keep their frames."""
    for _ in range(MOST_INSIDE):
        if not part:
            return ""
        frame = shell.frames[-1] if shell.frames else None
        if frame is not None and frame.kind == "case" and frame.wants_pattern and part != "esac":
            patterns, closes, rest = part.partition(")")
            frame.patterns += [one for one in patterns.split("|") if one]
            if not closes:
                return ""
            frame.wants_pattern = False
            _enter(frame, _matches(frame.subject, frame.patterns))
            frame.patterns = []
            part = rest.strip()
            continue
        if shell.asked is not None:
            if not re.match(r"(then|do)\b", part):
                shell.asked.append(part)
                return ""
            truth = _any_truth(shell.asked, shell)
            shell.asked = None
            if frame is not None and frame.kind == "if":
                _enter(frame, truth)
            part = re.sub(r"^(then|do)\b", "", part).strip()
            continue
        word = _CONTROL.match(part)
        function = re.match(r"(?:function\s+)?[\w-]+\s*\(\)\s*\{?|function\s+[\w-]+\s*\{", part)
        if function is not None:
            shell.frames.append(_Frame("function"))
            part = part[function.end() :].strip()
            continue
        if word is None:
            break
        part = _control(shell, word[0], part[word.end() :].strip())
    if part.endswith(")") and shell.frames and shell.frames[-1].kind == "shell":
        shell.frames.pop()
        part = part[:-1]
    return part


def _control(shell: _Shell, word: str, rest: str) -> str:
    frame = shell.frames[-1] if shell.frames else None
    if len(shell.frames) > MOST_INSIDE:
        raise ValueError(f"more than {MOST_INSIDE} branches and loops inside of one another")
    if word in ("if", "while", "until", "elif"):
        if word != "elif":
            shell.frames.append(_Frame("if" if word == "if" else "loop", words=rest))
        shell.asked = [rest]
        return ""
    if word == "else" and frame is not None:
        _enter(frame, True)
    elif word in ("fi", "done", "esac", "}", ")") and frame is not None:
        shell.frames.pop()
    elif word in ("{", "("):
        shell.frames.append(_Frame("shell" if word == "(" else "function"))
    elif word == "for":
        name, _, items = rest.partition(" in ")
        shell.frames.append(_Frame("loop", words=rest))
        if _NAME.fullmatch(name.strip()):
            values = words_of(items, shell)
            shell.known[name.strip()] = values[0] if len(values) == 1 else f"${{{name.strip()}}}"
        return ""
    elif word == "case":
        subject = words_of(re.sub(r"\bin$", "", rest.partition(" in ")[0]), shell)
        is_known = len(subject) == 1 and not names_in(subject[0])
        shell.frames.append(
            _Frame("case", False, False, rest, subject[0] if is_known else None, wants_pattern=True)
        )
        return rest.partition(" in ")[2].strip()
    return rest


def _enter(frame: _Frame, truth: bool | None) -> None:
    """Go into the next branch of an `if` or a `case`."""
    frame.runs = _all_of([truth, None if frame.taken is None else not frame.taken])
    if frame.taken is not True:
        frame.taken = True if frame.runs else None if frame.runs is None else frame.taken


def _matches(subject: str | None, patterns: list[str]) -> bool | None:
    asked = [one.strip().lstrip("(").strip("\"'") for one in patterns]
    if "*" in asked:
        return True
    return None if subject is None else any(fnmatchcase(subject, one) for one in asked)


def _all_of(truths: list[bool | None]) -> bool | None:
    return False if False in truths else None if None in truths else True


def _any_truth(parts: list[str], shell: _Shell) -> bool | None:
    """A condition; of several parts (`;`, `&&`) the last decides where all are known."""
    if len(parts) == 1:
        return _truth(words_of(parts[0], shell), shell)
    truths = [_truth(words_of(one, shell), shell) for one in parts]
    return None if len(set(truths)) > 1 else truths[0]


_COMPARES: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def _truth(words: list[str], shell: _Shell) -> bool | None:
    """Whether a test holds; None where it depends on what is not known."""
    if words[:1] == ["(("]:
        number = _number(" ".join(words[1:]).removesuffix("))"), shell)
        return None if number is None else number != 0
    if words[:1] in (["[["], ["["], ["test"]):
        words = words[1:] if words[0] == "test" else words[1:-1]
    for mark, join in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if mark in words:
            at = words.index(mark)
            sides = [_truth(words[:at], shell), _truth(words[at + 1 :], shell)]
            known = [one for one in sides if one is not None]
            return (join is any) if (join is any) in known else None if None in sides else join(known)
    if words[:1] == ["!"]:
        truth = _truth(words[1:], shell)
        return None if truth is None else not truth
    if any(names_in(word) for word in words):
        return None
    match words:
        case ["true"]:
            return True
        case ["false"]:
            return False
        case ["-z", text]:
            return text == ""
        case ["-n", text]:
            return text != ""
        case [one, "=" | "==", other]:
            return fnmatchcase(one, other)
        case [one, "!=", other]:
            return not fnmatchcase(one, other)
        case [one, mark, other] if mark in _COMPARES and _is_whole(one) and _is_whole(other):
            return _COMPARES[mark](int(one), int(other))
        case _:
            return None


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", text) is not None


def _assigns(shell: _Shell, part: str, words: list[str], *, is_sure: bool) -> bool:
    """Set what a part sets, where it does nothing else. What may not be reached is not known after it."""
    given = words[1:] if words[0] in _DECLARES else words
    given = [word for word in given if not word.startswith("-")] if words[0] in _DECLARES else given
    array = re.match(r"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=\(", part)
    if array is not None:
        end = part.rfind(")")
        items = words_of(part[array.end() : end if end >= array.end() else len(part)], shell)
        before = shell.arrays.get(array[1], []) if array[2] else []
        if is_sure and sum(map(len, [*before, *items])) <= MOST_OPEN:
            shell.arrays[array[1]] = [*before, *items]
        elif shell.arrays.pop(array[1], None) != items:
            shell.known[array[1]] = f"${{{array[1]}}}"
        return True
    if words[0] == "unset":
        for name in words[1:]:
            shell.known.pop(name, None)
        return True
    found = [_ASSIGNED.match(word) for word in given]
    if words[0] not in _DECLARES and (not found or None in found):
        return words[0] == ":"
    for word, name in zip(given, found, strict=True):
        if name is None:
            continue
        value = word[name.end() :]
        value = shell.known.get(name[1], "") + value if name[2] else value
        if (not is_sure and shell.known.get(name[1]) != value) or len(value) > MOST_OPEN:
            value = f"${{{name[1]}}}"
        shell.known[name[1]] = value
        shell.arrays.pop(name[1], None)
    return True


@dataclass(slots=True)
class _Words:
    """Words, of which the last may be open."""

    whole: list[str] = field(default_factory=list[str])
    last: str | None = None
    quoted: set[int] = field(default_factory=set[int])
    """Places of words that begin with a quote: they redirect nothing."""

    def quote(self) -> None:
        """A quote opens or closes."""
        if self.last is None:
            self.quoted.add(len(self.whole))
        self.put("")

    def put(self, text: str) -> None:
        self.last = (self.last or "") + text

    def end(self) -> None:
        if self.last is not None:
            self.whole.append(self.last)
        self.last = None

    def split(self, text: str) -> None:
        """Put a value that stands without quotes: its spaces divide words."""
        for piece in re.split(r"(\s+)", text):
            if piece.isspace():
                self.end()
            elif piece:
                self.put(piece)


def words_of(text: str, shell: _Shell) -> list[str]:
    """The words of a part, without its quotes and redirections, with what is known in place.

    Raises: ValueError where quotes do not close.
    """
    words = _Words()
    at, quote = 0, ""
    while at < len(text) and len(words.whole) <= MOST_OPEN and len(words.last or "") <= MOST_OPEN:
        letter = text[at]
        several = _ALL_OF.match(text, at) if not quote else None
        if several is not None and several[1] in shell.arrays:
            for item in shell.arrays[several[1]]:
                words.put(item)
                words.end()
            at = several.end()
        elif letter == "'" and quote != '"':
            quote = "" if quote else letter
            words.quote()
            at += 1
        elif quote == "'":
            words.put(letter)
            at += 1
        elif letter == '"':
            quote = "" if quote else letter
            words.quote()
            at += 1
        elif letter == "\\" and at + 1 < len(text):
            keeps = quote == '"' and text[at + 1] not in '$`"\\\n'
            words.put(letter * keeps + text[at + 1])
            at += 2
        elif letter == "$":
            value, at = _expanded(text, at, shell, 0)
            is_whole = quote or names_in(value) or _ASSIGNED.fullmatch(words.last or "") is not None
            words.put(value) if is_whole else words.split(value)
        elif letter.isspace() and not quote:
            words.end()
            at += 1
        elif letter == "#" and not quote and words.last is None:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            words.put(letter)
            at += 1
    if quote:
        raise ValueError("No closing quotation")
    words.end()
    return _without_redirections(words.whole, words.quoted)


def _without_redirections(words: list[str], quoted: set[int]) -> list[str]:
    kept: list[str] = []
    skips = False
    for at, word in enumerate(words):
        is_text = at in quoted or words[:1] in (["[["], ["["], ["(("])
        found = None if is_text else _REDIRECTS.fullmatch(word)
        if skips or found is not None:
            skips = found is not None and not found[3] and not skips
            continue
        kept.append(word)
    return kept


def _expanded(text: str, at: int, shell: _Shell, depth: int) -> tuple[str, int]:
    """(what a `$` at a place stands for, or itself where that is not known; where it ends)."""
    if text.startswith("$((", at):
        end = _closing(text, at + 1, "(", ")")
        number = _number(text[at + 3 : end - 2], shell) if end - 2 >= at + 3 else None
        return (text[at:end] if number is None else str(number)), end
    if text.startswith("$(", at):
        end = _closing(text, at + 1, "(", ")")
        inside = text[at + 2 : end - 1].strip()
        return (str(Path.cwd()) if inside == "pwd" else text[at:end]), end
    if text.startswith("${", at):
        end = _closing(text, at + 1, "{", "}")
        value = _parameter(text[at + 2 : end - 1], shell, depth)
        return (text[at:end] if value is None or len(value) > MOST_OPEN else value), end
    if (found := _NAME.match(text, at + 1)) is not None:
        value = _value_of(found[0], shell)
        return (found[0].join(["$", ""]) if value is None else value), found.end()
    if text[at + 1 : at + 2] in ("@", "*"):
        return "", at + 2
    return text[at : at + 2] if at + 1 < len(text) else "$", min(at + 2, len(text))


def _value_of(name: str, shell: _Shell) -> str | None:
    if name in shell.arrays and name not in shell.known:
        return " ".join(shell.arrays[name])
    return shell.known[name] if name in shell.known else _of_environment(name)


def _parameter(inside: str, shell: _Shell, depth: int) -> str | None:
    """What `${...}` stands for; None where that is not known."""
    found = re.match(r"(#?)(\w+)(\[[@*\d]+\])?(.*)", inside, re.S)
    if found is None or depth > MOST_INSIDE:
        return None
    counts, name, index, rest = found.groups()
    value = _value_of(name, shell)
    if index and name in shell.arrays:
        items = shell.arrays[name]
        if counts:
            return str(len(items)) if not rest else None
        at = index[1:-1]
        value = " ".join(items) if at in "@*" else items[int(at)] if int(at[:6]) < len(items) else ""
    if counts:
        return None if value is None or rest else str(len(value))
    if not rest:
        return value
    kind = re.match(r":?[-=+?]", rest)
    if kind is not None:
        is_empty = value is None or (kind[0][0] == ":" and value == "")
        other = kind[0][-1]
        if other == "+":
            return "" if is_empty else _plain(rest[kind.end() :], shell, depth)
        if not is_empty:
            return value
        if other == "?":
            return None
        default = _plain(rest[kind.end() :], shell, depth)
        if other == "=":
            shell.known[name] = default
        return default
    return None if value is None else _cut(value, rest)


def _cut(value: str, how: str) -> str | None:
    """A value without its beginning or end, with a part replaced, or in other letters."""
    if how in (",,", "^^"):
        return value.lower() if how == ",," else value.upper()
    part = re.fullmatch(r":(\d{1,6})(?::(\d{1,6}))?", how)
    if part is not None:
        start = int(part[1])
        return value[start : None if part[2] is None else start + int(part[2])]
    swap = re.fullmatch(r"(//?)([^/*?\[$]+)/([^$]*)", how)
    if swap is not None:
        return value.replace(swap[2], swap[3], -1 if swap[1] == "//" else 1)
    trim = re.fullmatch(r"(##?|%%?)([^$]*)", how, re.S)
    if trim is None or len(value) > 1000:
        return None
    mark, pattern = trim.groups()
    places = range(len(value) + 1)
    fits = [at for at in places if fnmatchcase(value[:at] if mark[0] == "#" else value[at:], pattern)]
    if not fits:
        return value
    is_low = (mark == "#") or (mark == "%%")
    at = min(fits) if is_low else max(fits)
    return value[at:] if mark[0] == "#" else value[:at]


def _plain(text: str, shell: _Shell, depth: int) -> str:
    """A default as one text, without its quotes."""
    made, at, quote = "", 0, ""
    while at < len(text) and len(made) <= MOST_OPEN:
        letter = text[at]
        if letter == "$" and quote != "'":
            value, at = _expanded(text, at, shell, depth + 1)
            made += value
            continue
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        else:
            made += letter
        at += 1
    return made


def _closing(text: str, at: int, opens: str, closes: str) -> int:
    """The place after the bracket that closes the one at a place; the end where none does."""
    depth, quote = 0, ""
    while at < len(text):
        letter = text[at]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "\\":
            at += 1
        elif letter in (opens, closes):
            depth += 1 if letter == opens else -1
            if depth == 0:
                return at + 1
        at += 1
    return len(text)


_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda one, other: int(one / other),
    ast.Mod: lambda one, other: one - other * int(one / other),
    ast.Pow: lambda one, other: one**other if 0 <= other < 64 else 2**64,
}
RELATIONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
"""Comparisons that a shell and Python write alike."""


def _number(text: str, shell: _Shell, depth: int = 0) -> int | None:
    """The value of arithmetic; None where it is not known."""
    if len(text) > 500 or depth > 8:
        return None
    plain = _plain(text, shell, depth).replace("&&", " and ").replace("||", " or ").strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _sum(ast.parse(plain, mode="eval").body, shell, depth)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None


def _sum(node: ast.expr, shell: _Shell, depth: int) -> int:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError
        case ast.Constant(value=int() as number):
            made = number
        case ast.Name(id=name):
            value = _value_of(name, shell)
            number = None if value is None else _number(value, shell, depth + 1)
            if number is None:
                raise ValueError(name)
            made = number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            made = _ARITHMETIC[type(op)](_sum(left, shell, depth), _sum(right, shell, depth))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            made = -_sum(inner, shell, depth)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in RELATIONS:
            made = int(RELATIONS[type(op)](_sum(left, shell, depth), _sum(right, shell, depth)))
        case ast.BoolOp(op=op, values=values):
            truths = [_sum(one, shell, depth) != 0 for one in values]
            made = int(all(truths) if isinstance(op, ast.And) else any(truths))
        case _:
            raise ValueError
    if abs(made) >= 2**63:
        raise ValueError
    return made


_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE", re.I)
_SECRET = re.compile(
    r"(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[a-z]-|AKIA|eyJ|AIza|-----BEGIN)|[0-9a-f]{32,}"
    r"|(?=.*[0-9])(?=.*[a-z])(?=.*[A-Z])[\w+/=-]{24,}"
)


def _of_environment(name: str) -> str | None:
    """The value of a variable of the environment, for a recipe to hold: never what looks like a secret."""
    value = os.environ.get(name)
    return None if value is None or _SECRET_NAME.search(name) or _SECRET.match(value) else value


def names_in(text: str) -> list[str]:
    """What a text still has of the shell: variables, and commands whose output is meant.

    `${a.b}` is none of the shell's.
    """
    return _OPEN.findall(text)


def _without_documents(text: str) -> str:
    """A script without the texts that it holds (`<<EOF`)."""
    kept: list[str] = []
    ends = ""
    for line in text.splitlines():
        if ends:
            ends = "" if line.strip() == ends else ends
            continue
        found = re.search(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1", line)
        if found is not None:
            ends, line = found[2], line[: found.start()] + line[found.end() :]
        kept.append(line)
    return "\n".join(kept)


def _whole_lines(text: str) -> Iterator[str]:
    """Lines that say something, those joined that quotes or brackets hold together."""
    held: list[str] = []
    length, opened = 0, ""
    for line in text.splitlines():
        after = _opened(line, opened)
        if not held and after and not re.search(r"=|--\w|\$|\[\[|`", line):
            continue  # A sentence beside the command, with an apostrophe.
        held.append(line)
        length, opened = length + len(line) + 1, after
        if opened and length < MOST_OPEN:
            continue
        yield from _said(held)
        held, length, opened = [], 0, ""
    yield from _said(held)


def _said(lines: list[str]) -> Iterator[str]:
    line = "\n".join(lines)
    if line.strip() and not line.lstrip().startswith("#"):
        yield line


def _opened(line: str, before: str) -> str:
    """The quotes and brackets that are open after a line, the innermost last; `before`: those before it."""
    opened = [*before]
    at = 0
    while at < len(line):
        letter, inner = line[at], opened[-1] if opened else ""
        if inner == "'" or letter == inner == '"':
            opened = opened[:-1] if letter == inner else opened
        elif letter == "\\":
            at += 1
        elif line.startswith(("$(", "${"), at) or (not inner and line.startswith("=(", at)):
            opened.append({"(": ")", "{": "}"}[line[at + 1]])
            at += 1
        elif inner != '"' and letter in "'\"":
            opened.append(letter)
        elif inner == ")" and letter == "(":
            opened.append(")")
        elif inner in (")", "}") and letter == inner:
            opened.pop()
        elif inner in ("", ")") and letter == "#" and (at == 0 or line[at - 1].isspace()):
            break
        at += 1
        if len(opened) > MOST_INSIDE:
            return ""
    return "".join(opened)


def _parts(line: str) -> Iterator[tuple[str, str]]:
    """(the mark before it, each part) of a line: parts are commands between `;`, `&&`, `||`, `|` and `&`."""
    mark, start = ";", 0
    for at, end in _marks(line):
        yield mark, line[start:at]
        mark, start = line[at:end], end
    yield mark, line[start:]


_MARK = re.compile(r";;|&&|\|\||[;|\n]|(?<![<>&0-9])&(?![>&])")


def _marks(text: str) -> Iterator[tuple[int, int]]:
    """Places of the marks between commands."""
    at, quote, in_test = 0, "", False
    while at < len(text):
        letter = text[at]
        starts_word = at == 0 or text[at - 1].isspace()
        if letter == "\\" and quote != "'":
            at += 2
        elif quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
            at += 1
        elif letter == "#" and starts_word:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif text.startswith(("$(", "${", "=("), at):
            at = _closing(text, at + 1, text[at + 1], "}" if text[at + 1] == "{" else ")")
        elif (text.startswith(("[[", "(("), at) and starts_word) or text.startswith(("]]", "))"), at):
            in_test = letter in "[("
            at += 2
        elif not in_test and (found := _MARK.match(text, at)) is not None:
            yield found.span()
            at = found.end()
        else:
            at += 1
