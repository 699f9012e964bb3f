"""Name patterns: one text that both recognises tensor names and writes them.

A name is a row of components between dots. A pattern is a name with placeholders:

    {layer}              a piece of one component, at least one character, no dots
    {expert:int}         the same, but a whole number as Python writes it: 0, 1, 2, ...
    {kind:weight|bias}   the same, but one of these words
    {rest:+}             one or more whole components
    {prefix:*}           none or more whole components; when none, its dot vanishes as well

Everything else is literal. A placeholder that stands several times, in one pattern or in several patterns of one rule,
means the same text everywhere; what follows its colon needs to be written only once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from hf_stream.errors import LayoutError

_PLACEHOLDER = re.compile(r"\{(\w+)(?::([^{}]+))?\}")
_MANY = ("*", "+")
_KINDS = ("int", *_MANY)
# What no tensor is called, and what stands in globs and regular expressions.
_OF_GLOBS = re.compile(r"[*?]|\[[^\]]*-[^\]]*\]")
_OF_REGEXES = re.compile(r"[\\|]|^\.\*|\.\*(?!\.|$)|\.\+|^\^|\$$|[)\]][*+?]")
_NO_WORD = re.compile(r"[][\\().*?^$]|^$")
_RIGHT_WAYS = (
    "Write {layer} for a piece of a name between dots, {layer:int} for a number, {kind:weight|bias} for one of several "
    "words, {prefix:*} for whatever stands before or after, dots included."
)


class Pattern:
    """A compiled pattern. Build it with `compile_patterns`, which shares what the patterns of one rule say.

    Attributes:
        text: The pattern as written.
        fields: The placeholders' names, in order of appearance.
        components: The components' texts; None for one that stands for several components, which a search for
            candidates may not count.
    """

    __slots__ = ("_chunks", "_many", "_regex", "components", "fields", "text")

    def __init__(self, text: str, specs: Mapping[str, str]) -> None:
        self.text = text
        self.fields = tuple(dict.fromkeys(_placeholders(text)))
        components = text.split(".")
        many = [_many_field(component, specs, text) for component in components]
        if any(one and other for one, other in pairwise(many)):
            raise LayoutError(f"pattern '{text}': two placeholders for several components cannot stand side by side.")
        _check_borders(text, specs)
        self.components = tuple(None if field else component for component, field in zip(components, many, strict=True))
        self._many = tuple(field for field in many if field)
        self._regex = re.compile(_regex(components, many, specs))
        self._chunks = _chunks(components, many)

    def match(self, name: str) -> dict[str, str] | None:
        """What each placeholder stands for in `name`, or None where the pattern does not fit."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        bindings = found.groupdict()
        for field in self._many:
            bindings[field] = bindings[field].strip(".")
        return bindings

    def format(self, bindings: Mapping[str, object]) -> str:
        """The name that `match` would read back as `bindings`."""
        if not self._many:
            return self._chunks[0].format_map(bindings)
        return ".".join(filter(None, [chunk.format_map(bindings) for chunk in self._chunks]))

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


def is_literal(component: str | None) -> bool:
    """Whether a component of a pattern fits exactly one text."""
    return component is not None and "{" not in component


def compile_patterns(texts: Sequence[str], specs: Mapping[str, str] | None = None) -> tuple[Pattern, ...]:
    """Compile the patterns of one rule together.

        >>> src, dst = compile_patterns(["{prefix:*}.query.{kind:weight|bias}", "{prefix}.q.{kind}"])
        >>> src.match("layers.3.query.bias")
        {'prefix': 'layers.3', 'kind': 'bias'}
        >>> dst.format(src.match("query.weight"))
        'q.weight'
        >>> dst.match("layers.3.q.scale") is None
        True

    Args:
        texts: The patterns.
        specs: What placeholders must stand for (as after the colon), beside what the texts say themselves.

    Raises:
        LayoutError: a pattern is malformed, or two of them disagree about a placeholder.
    """
    shared = dict(specs or {})
    for text in texts:
        if not text:
            raise LayoutError("a pattern is empty. Write the name of a tensor.")
        for field, spec in _placeholders(text).items():
            if spec and shared.setdefault(field, spec) != spec:
                raise LayoutError(
                    f"pattern '{text}': {{{field}:{spec}}} is {{{field}:{shared[field]}}} elsewhere in the rule. "
                    "Use one meaning, or two placeholders."
                )
    return tuple(_compile(text, tuple(shared.items())) for text in texts)


@lru_cache(maxsize=4096)
def _compile(text: str, specs: tuple[tuple[str, str], ...]) -> Pattern:
    return Pattern(text, dict(specs))


def _placeholders(text: str) -> dict[str, str]:
    """Each placeholder of `text` and what follows its colon ('' where nothing does)."""
    fields: dict[str, str] = {}
    for field, spec in _PLACEHOLDER.findall(text):
        if not field.isidentifier():
            raise LayoutError(f"pattern '{text}': placeholder '{field}' is not a name. Use letters, digits and '_'.")
        fields[field] = spec or fields.get(field, "")
        _check_spec(text, field, spec)
    literal = _PLACEHOLDER.sub("x", text)
    if "{" in literal or "}" in literal:
        raise LayoutError(f"pattern '{text}': a brace is not part of a placeholder such as {{layer}} or {{rest:*}}.")
    for signs, what in ((_OF_REGEXES, "a regular expression"), (_OF_GLOBS, "a glob")):
        if found := signs.search(literal):
            raise LayoutError(
                f"pattern '{text}' is {what} ('{found[0]}'), and not a name with placeholders. {_translated(text)}"
            )
    return fields


def _translated(text: str) -> str:
    """How to write what a glob means, where that can be told."""
    *components, last = text.split(".")
    stars = iter(["{prefix:*}" if text.startswith("*.") else "{x}", *(f"{{x{i}}}" for i in range(2, len(text)))])
    words = [next(stars) if component == "*" else component for component in components]
    pattern = ".".join([*words, "{rest:+}" if last == "*" else last])
    plain = not _OF_GLOBS.search(_PLACEHOLDER.sub("x", pattern)) and not _OF_REGEXES.search(text)
    return f"Write '{pattern}'." if plain else _RIGHT_WAYS


def _check_spec(text: str, field: str, spec: str) -> None:
    """Refuse what follows a colon and is neither a kind nor words: nobody means a placeholder for a single word."""
    if not spec or spec in _KINDS:
        return
    words = spec.split("|")
    if any(map(_NO_WORD.search, words)):
        raise LayoutError(f"pattern '{text}': {{{field}:{spec}}} is no list of words with '|' between. {_RIGHT_WAYS}")
    if len(words) == 1:
        raise LayoutError(
            f"pattern '{text}': {{{field}:{spec}}} would fit '{spec}' alone, a word that needs no braces. {_RIGHT_WAYS}"
        )


def _check_borders(text: str, specs: Mapping[str, str]) -> None:
    """Refuse placeholders of which nobody could tell where one ends and the next begins."""
    for first, second in pairwise(_PLACEHOLDER.finditer(text)):
        if first.end() == second.start() and not any("|" in specs.get(found[1], "") for found in (first, second)):
            raise LayoutError(
                f"pattern '{text}': nothing tells where {{{first[1]}}} ends and {{{second[1]}}} begins. "
                "Put a text between them."
            )


def _many_field(component: str, specs: Mapping[str, str], text: str) -> str | None:
    """The placeholder for several components that `component` is, if it is one."""
    fields = [field for field in _placeholders(component) if specs.get(field) in _MANY]
    if not fields:
        return None
    if not _PLACEHOLDER.fullmatch(component) or len(re.findall(rf"\{{{fields[0]}\b", text)) > 1:
        raise LayoutError(
            f"pattern '{text}': {{{fields[0]}}} stands for whole components: put dots around it, and use it once."
        )
    return fields[0]


def _regex(components: Sequence[str], many: Sequence[str | None], specs: Mapping[str, str]) -> str:
    """A regular expression for a name; a placeholder for several components takes one neighbouring dot along."""
    seen: set[str] = set()
    regex = ""
    last = len(components) - 1
    for i, (component, field) in enumerate(zip(components, many, strict=True)):
        if field is None:
            regex += _component_regex(component, specs, seen)
        elif last == 0:
            regex += rf"(?P<{field}>[^.]+(?:\.[^.]+)*)"
        elif i < last:
            regex += rf"(?P<{field}>(?:[^.]+\.){specs[field]})"
        else:
            regex += rf"(?P<{field}>(?:\.[^.]+){specs[field]})"
        next_takes_the_dot = i + 1 == last and many[last] is not None
        if i < last and field is None and not next_takes_the_dot:
            regex += r"\."
    return regex


def _component_regex(component: str, specs: Mapping[str, str], seen: set[str]) -> str:
    regex = ""
    end = 0
    for found in _PLACEHOLDER.finditer(component):
        field = found[1]
        regex += re.escape(component[end : found.start()])
        regex += f"(?P={field})" if field in seen else f"(?P<{field}>{_word_regex(specs.get(field))})"
        seen.add(field)
        end = found.end()
    return regex + re.escape(component[end:])


def _word_regex(spec: str | None) -> str:
    if spec is None:
        return "[^.]+"
    if spec == "int":
        return "0|[1-9][0-9]*"
    return "|".join(re.escape(word) for word in spec.split("|"))


def _chunks(components: Sequence[str], many: Sequence[str | None]) -> tuple[str, ...]:
    """Templates for str.format_map, joined by dots where not empty: several components may be none."""
    plain = [_PLACEHOLDER.sub(r"{\1}", component) for component in components]
    chunks: list[str] = []
    for i, component in enumerate(plain):
        if i and not many[i] and not many[i - 1]:
            chunks[-1] += "." + component
        else:
            chunks.append(component)
    return tuple(chunks)
