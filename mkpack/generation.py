"""One generation: its options, its result, and the iterator a caller holds."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Literal, TypedDict, TypeVar

from mkpack import abi
from mkpack.text import Sampling, checked_sampling

T = TypeVar("T")
StopReason = Literal["stop", "length", "cancelled"]
STOP_REASONS: dict[int, StopReason] = {
    abi.STOP_TOKEN: "stop",
    abi.STOP_LENGTH: "length",
    abi.STOP_CONTEXT: "length",
    abi.STOP_CANCELLED: "cancelled",
}


def spread(vocab_size: int, count: int, first: int = 0) -> list[int]:
    """Tokens `first` on of a fixed spread over the vocabulary, for measurements: speed does not depend on which are
    run, except through the experts they choose."""
    return [(7919 * i + 13) % vocab_size for i in range(first, first + count)]


class GenerateOptions(TypedDict, total=False):
    """Options of one generation. What is absent or None is the artifact's default, as generation_config.json gives it.

    max_new_tokens: default whatever fits the context. temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
    min_p: 0 is off. repetition_penalty: 1 is off. seed: 0 to 2**64 - 1, default a random one. stop_tokens: ids that
    end the generation, in place of the model's own.
    """

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop_tokens: Sequence[int] | None


@dataclass(frozen=True)
class Result:
    """What one generation did.

    stop_reason: "stop" (a stop token), "length" (max_new_tokens or the context is full) or "cancelled". tokens: ids
    chosen, a stop token included. num_prompt_tokens: those run now; num_cached_tokens: those the cache already held.
    prefill_s: seconds until the first token was chosen; decode_s: of all later ones. seed: repeats the draws.
    """

    stop_reason: StopReason
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    prefill_s: float
    decode_s: float
    seed: int

    @property
    def num_new_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class Job:
    """One generation as asked for: the whole prompt, and whether what the cache holds of it is used again."""

    prompt: list[int]
    reuse: bool
    request: abi.Request
    stop_tokens: frozenset[int]
    result: Result | None = None


def make_request(
    defaults: Sampling,
    stop_tokens: Sequence[int],
    *,
    max_new_tokens: int | None,
    room: int,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
) -> abi.Request:
    """mk_request of the options, `defaults` and `room` (tokens that fit) filling in. UserError: all bad values."""
    extra = []
    if max_new_tokens is not None and not (isinstance(max_new_tokens, int) and 1 <= max_new_tokens < 2**31):
        extra.append(f"max_new_tokens is {max_new_tokens!r}; expected a whole number from 1 to {2**31 - 1}")
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**64):
        extra.append(f"seed is {seed!r}; expected a whole number from 0 to 2**64 - 1")
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    chosen = checked_sampling(defaults, given, extra)
    return abi.Request(
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
        top_k=chosen.top_k,
        max_new_tokens=max_new_tokens or room,
        seed=secrets.randbits(64) if seed is None else seed,
        stop_tokens=(ctypes.c_int32 * len(stop_tokens))(*stop_tokens),
        num_stop_tokens=len(stop_tokens),
    )


class Generation(Generic[T]):
    """Iterates over one generation; leaving it early (close, Ctrl-C, garbage collection) cancels it.

    It begins with the first piece. `result` is None until it has ended, and when it failed.
    """

    def __init__(self, job: Job, pieces: Generator[T, None, None]) -> None:
        self._job = job
        self._pieces = pieces
        self._failed = False

    @property
    def result(self) -> Result | None:
        return self._job.result

    def __iter__(self) -> Generation[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except Exception:
            self._failed = True
            raise

    def close(self) -> None:
        """Cancels what still runs and waits for its end."""
        self._pieces.close()
        if self._job.result is None and not self._failed:  # closed before anything ran
            self._job.result = Result("cancelled", (), 0, 0, 0.0, 0.0, self._job.request.seed)

    def __enter__(self) -> Generation[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()
