"""What rounds cost on a machine, as a small versioned YAML file.

    version: 1
    device: NVIDIA H100 SXM
    target: 8B, bf16
    drafter: DFlash, 5 layers, bf16
    measured: false
    how: where the figures come from
    elsewhere: 0.0003              # seconds a round spends outside both forwards
    verify:                        # the target's forward
      interpolation: linear        # or step: a forward is padded up to the next entry
      rows: [1, 256, 4096]         # verified tokens of the whole batch, increasing
      seconds: [0.005, 0.0075, 0.08]
      per_request: 0.0             # seconds one request adds
      per_context_token: 6.0e-8    # seconds one token of context adds
      per_row_context: 0.0         # seconds one row adds per token of its request's context
    draft: {...}                   # the drafter's pass, likewise

A table of rows expresses any shape: memory-bound flats, tile and CUDA-graph steps, compute-bound
slopes. All times are seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

VERSION = 1

Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1e-9, le=3600, allow_inf_nan=False)]


class CostError(ValueError):
    """A cost file that cannot be used. The message names file, line and fault."""


class Forward(BaseModel):
    """Seconds of one model's forward pass; fields as in the module's text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interpolation: Literal["linear", "step"] = "linear"
    rows: list[Annotated[int, Field(ge=1, le=2**31)]] = Field(min_length=1)
    seconds: list[Positive] = Field(min_length=1)
    per_request: Seconds = 0.0
    per_context_token: Seconds = 0.0
    per_row_context: Seconds = 0.0

    @model_validator(mode="after")
    def _table(self) -> Forward:
        if len(self.rows) != len(self.seconds):
            raise ValueError(f"{len(self.rows)} rows but {len(self.seconds)} seconds")
        if any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError("rows must increase")
        if any(b < a for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError("seconds must not fall with rows")
        return self

    def __call__(
        self, batch: int, rows: int | np.ndarray, context: float | np.ndarray = 0
    ) -> float | np.ndarray:
        """Seconds of a pass.

        Args:
            batch: requests in it.
            rows: rows in it, of all requests; a number or an array.
            context: committed tokens of all its requests together, read once each; rows are
                taken to be spread evenly over the requests.
        """
        rows = np.asarray(rows, dtype=np.float64)
        attention = (self.per_context_token + self.per_row_context * rows / batch) * context
        return self._by_rows(rows) + self.per_request * batch + attention

    def _by_rows(self, rows: np.ndarray) -> np.ndarray:
        """The table; beyond its end it goes on as its last two entries."""
        if self.interpolation == "step":
            entry = np.searchsorted(self.rows, rows, side="left")
            seconds = np.asarray(self.seconds)[entry.clip(max=len(self.rows) - 1)]
        else:
            seconds = np.interp(rows, self.rows, self.seconds)
        if len(self.rows) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            seconds = seconds + slope * np.maximum(rows - self.rows[-1], 0.0)
        return seconds


class Profile(BaseModel):
    """What a measured file was fitted to.

    Attributes:
        versions: of what took part.
        residual_median, residual_worst: relative differences of fit and points.
        verify, draft: points as (requests, rows, context tokens of all, seconds).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: dict[str, str]
    residual_median: float
    residual_worst: float
    verify: list[tuple[int, int, int, float]]
    draft: list[tuple[int, int, int, float]]


class Cost(BaseModel):
    """A cost file's content; calling it gives the seconds of a verification."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    device: str = Field(min_length=1)
    target: str = Field(min_length=1)
    drafter: str = Field(min_length=1)
    measured: bool
    how: str = Field(min_length=1)
    elsewhere: Seconds = 0.0
    verify: Forward
    draft: Forward
    profile: Profile | None = None

    def check(self, device: str, target: str, drafter: str) -> None:
        """Refuse other circumstances than these.

        Raises:
            CostError: measured, or derived, for another machine or model; says which.
        """
        here = {"device": device, "target": target, "drafter": drafter}
        for name, value in here.items():
            if getattr(self, name) != value:
                raise CostError(
                    f"made for the {name} {getattr(self, name)!r}, this is {value!r}; measure with "
                    "`libraspec profile`, or use it all the same with --libraspec-cost-unchecked "
                    "true"
                )

    def __call__(
        self, batch: int, rows: int | np.ndarray, context: float | np.ndarray = 0
    ) -> float | np.ndarray:
        """Seconds of the target's forward; ``lambda n: cost(bs, n, context)`` suits allocate."""
        return self.verify(batch, rows, context)


def read(path: str | Path) -> Cost:
    """Read a cost file.

    Raises:
        CostError: not there, not YAML, of a newer version, or a field is missing or wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise CostError(f"{path}:{line}: not YAML: {getattr(error, 'problem', error)}") from None
    except (ValueError, KeyError, OverflowError, RecursionError) as error:  # a tag, a date, a depth
        raise CostError(f"{path}: not a cost file: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CostError(f"{path}:1: not a cost file: needs keys like version, device, verify")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        line = _line(tree, ["version"])
        raise CostError(
            f"{path}:{line}: cost file version {version} is newer than this program reads "
            f"({VERSION}); update libraspec-sglang"
        )
    try:
        return Cost(**content)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        line = _line(tree, first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise CostError(f"{path}:{line}: {name}: {message}") from None


def write(cost: Cost, path: str | Path) -> None:
    """Write a cost file; :func:`read` gives back an equal object."""
    content = cost.model_dump(mode="json", exclude_none=True)
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=96)
    Path(path).write_text(text, encoding="utf-8")


def _line(node: Any, keys: Any) -> int:
    """Line of the deepest node on the way along ``keys`` (mapping keys and list indices)."""
    line = node.start_mark.line + 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == str(key)]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
            node = node.value[key]
            line = node.start_mark.line + 1
    return line
