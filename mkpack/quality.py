"""How much quantising changed a model: perplexity of both, and the KL divergence from one to the other, on a text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from mkpack.errors import UserError, unreadable
from mkpack.text import Text

if TYPE_CHECKING:
    import numpy as np

# Runs tokens after those already run; float32 logits [tokens, vocab_size] of each of them.
Step = Callable[[Sequence[int]], "np.ndarray"]


@dataclass(frozen=True)
class Quality:
    """Both models read the same `tokens` tokens. KL is of the reference's next-token distribution from the model's,
    in nats, averaged over positions; top1_agreement is the share of positions with the same most likely token."""

    tokens: int
    perplexity: float
    reference_perplexity: float
    kl_divergence: float
    top1_agreement: float

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def render(self) -> str:
        return (
            f"perplexity {self.perplexity:.3f}, reference {self.reference_perplexity:.3f} "
            f"({self.perplexity / self.reference_perplexity - 1:+.2%}); KL divergence {self.kl_divergence:.5f} nats; "
            f"same top token at {self.top1_agreement:.1%} of {self.tokens} positions"
        )


def read_text(path: Path | None) -> str:
    """The text to measure on; mkpack's own when `path` is None. UserError when it cannot be read."""
    if path is None:
        return files("mkpack").joinpath("data/quality.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read: {unreadable(e)}") from e


def tokens_of(text: str, tokenizer: Text, limit: int, context: int) -> list[int]:
    """The first tokens of the text, at most `limit` and what the context holds; UserError when below two."""
    tokens = tokenizer.encode_raw(text)[: min(limit, context)]
    if len(tokens) < 2:
        raise UserError(f"the quality text has {len(tokens)} tokens; at least 2 are needed to predict one")
    return tokens


def measure(model: Step, reference: Step, tokens: Sequence[int], chunk: int = 16) -> Quality:
    """Both steps start from an empty cache. chunk: tokens a call, at most the compiled-in limit of either.

    UserError for logits that are not finite.
    """
    import numpy as np

    nll = reference_nll = kl = 0.0
    agree = 0
    for start in range(0, len(tokens) - 1, chunk):
        now = tokens[start : min(start + chunk, len(tokens) - 1)]
        following = np.asarray(tokens[start + 1 : start + 1 + len(now)])
        rows = np.arange(len(now))
        p, q = (_log_softmax(step(now)) for step in (reference, model))
        nll -= float(q[rows, following].sum())
        reference_nll -= float(p[rows, following].sum())
        kl += float((np.exp(p) * (p - q)).sum())
        agree += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
    n = len(tokens) - 1
    return Quality(n, _perplexity(nll / n), _perplexity(reference_nll / n), kl / n, agree / n)


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700.0))  # beyond that a float is infinite, which JSON cannot say


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    import numpy as np

    if not np.isfinite(logits).all():
        raise UserError(
            "quality cannot be measured: the model computes NaN or infinite logits on the text: its weights overflow "
            "float32; check the checkpoint against its source"
        )
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def compare(
    path: Path, against: Path, *, text: Path | None = None, tokens: int | None = None, threads: int | None = None
) -> Quality:
    """`mkpack eval`: an artifact held against another of the same model; UserError when vocabularies differ."""
    from mkpack.loader import load

    with load(path, threads=threads) as model, load(against, threads=threads) as reference:
        if model.spec.vocab_size != reference.spec.vocab_size:
            raise UserError(
                f"{path} and {against} cannot be compared: vocab_size {model.spec.vocab_size} and "
                f"{reference.spec.vocab_size}"
            )
        context = min(model.context, reference.context)
        ids = tokens_of(read_text(text), model.text, tokens or context, context)
        return measure(lambda now: model.step(now, len(now)), lambda now: reference.step(now, len(now)), ids)
