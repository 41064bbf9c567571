"""Which methods choose the codes of a weight, how do they combine, and which formats do they fit?"""

from __future__ import annotations

from dataclasses import dataclass

SCALINGS = ("awq", "smoothquant")  # multiply input channels, and what feeds them divides
ROTATION = "quarot"  # before anything else, with what it puts in front of layers as their transform
CODINGS = ("rtn", "gptq")
ATOM_CLIP = 0.85  # of 4-bit activations: measured (docs/benchmarks/qspec.md); Atom has .9
ROW_SCALED = "zipper"  # one scale a row: what GPTQ, SmoothQuant and rotations choose codes of beside int4
REORDER = "atom"  # inputs by their size, the largest last, as outliers with int8 codes
ROTATED_AND_SMOOTHED = f"{ROTATION}+smoothquant"
ROTATED_AND_REORDERED = f"{ROTATION}+{REORDER}"  # one order of the residual stream, rotations of all other inputs
WORDS = (
    *CODINGS, *SCALINGS, ROTATION, REORDER, ROTATED_AND_SMOOTHED, ROTATED_AND_REORDERED,
    *(f"{first}+gptq" for first in (*SCALINGS, ROTATION, REORDER, ROTATED_AND_SMOOTHED, ROTATED_AND_REORDERED)),
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """rotates: whether `rotate` comes first. scaling: of input channels, or None. coding: "rtn" as a format rounds by
    itself, "clip" with scales that are searched for the layer's outputs (AWQ), "gptq" with the feedback of errors.
    reorders: whether inputs are put in the order of their squares, those with int8 codes last; of a method that
    rotates, too, channels of the residual stream alone (stream_order.py)."""

    word: str
    rotates: bool
    scaling: str | None
    coding: str
    reorders: bool = False

    @property
    def needs_hessians(self) -> bool:
        """Whether products of all inputs with one another are summed up; else a few inputs are kept."""
        return self.coding != "rtn"


def method_named(word: object) -> Method:
    """The method of a word, such as "gptq" or "awq+gptq". ValueError listing the methods."""
    if not isinstance(word, str) or word not in WORDS:
        raise ValueError(f"method is {word!r}, choose one of {', '.join(WORDS)}")
    steps = word.split("+")
    scaling = next((step for step in steps if step in SCALINGS), None)
    coding = steps[-1] if steps[-1] in CODINGS else "clip" if scaling == "awq" else "rtn"
    return Method(word, ROTATION in steps, scaling, coding, REORDER in steps)


def format_of(word: object) -> str:
    """The format whose codes a method chooses where nobody names one, as config.json writes it. ValueError as of
    `method_named`."""
    return formats_of(word)[0]


def formats_of(word: object) -> tuple[str, ...]:
    """All formats whose codes a method chooses, its own first. ValueError as of `method_named`."""
    method = method_named(word)
    if method.reorders:
        return ("int4-int8",)
    if method.rotates and method.scaling:
        return (ROW_SCALED, "int4")
    return ("int4",) if method.scaling == "awq" else ("int4", ROW_SCALED)


def clip_of(word: object) -> float:
    """What a method clips 4-bit activations at, where nobody says; 1: not at all. ValueError as of `method_named`."""
    return ATOM_CLIP if method_named(word).reorders else 1.0


def method_for(word: object, format: object) -> Method:
    """`method_named`; ValueError, too, where it chooses codes of another format."""
    method = method_named(word)
    if format not in formats_of(word):
        known = " or ".join(map(repr, formats_of(word)))
        raise ValueError(
            f"method {word!r} does not fit format {format!r}: it chooses codes of {known}; without "
            "a method every format rounds to nearest"
        )
    return method


def word_of(method: object, smoothing: object, rotation: object) -> object:
    """The method's word that `MLSpecConfig` asks for: ``method`` itself, or with smoothing "auto" and a rotation those
    of both and a coding. ValueError for values that there are not, and for a method that has such steps itself."""
    if smoothing is None and rotation is None:
        return method
    if smoothing not in (None, "auto"):
        raise ValueError(f"smoothing is {smoothing!r}, choose 'auto' (by output error, layer by layer) or None")
    if method is not None and method not in CODINGS:
        given = "smoothing" if rotation is None else "rotation"
        raise ValueError(f"method is {method!r} and {given} is given: give one word with all steps, or {given} and "
                         f"method {' or '.join(map(repr, CODINGS))}")  # fmt: skip
    steps = [ROTATION] * (rotation is not None) + ["smoothquant"] * (smoothing is not None)
    return "+".join([*steps, *(["gptq"] if method == "gptq" else [])])
