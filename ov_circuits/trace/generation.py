"""A generated continuation, step by step: which head moved the model towards each token that it chose.

What a decoder says at a position depends on nothing after it, so one run of the prompt with its continuation holds every step,
and each step's account is a ledger at the position before its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ov_circuits.errors import CircuitsError
from ov_circuits.model import Model
from ov_circuits.modes import ordinary_class
from ov_circuits.shown import counted, notebook_html
from ov_circuits.trace.engines import check_tokens, likeliest_continuation
from ov_circuits.trace.ledger import Account, accounts, logit_reading
from ov_circuits.trace.trace import Trace, prompt_ids, trace, whole_ids
from ov_circuits.words import token_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Step:
    """One token of a continuation.

    Attributes:
        position: the position that predicts it; the token stands at the next one.
        token: its id.
        text: its text.
        probability: what the model gave it.
        runner_up: the likeliest other token, which the account is against.
        runner_up_text, runner_up_probability: of it.
        account: of the logit difference of token and runner-up, before a softcap.
    """

    position: int
    token: int
    text: str
    probability: float
    runner_up: int
    runner_up_text: str
    runner_up_probability: float
    account: Account


@ordinary_class
@dataclass(frozen=True, eq=False)
class Generation:
    """A prompt and its continuation.

    Attributes:
        trace: of both together.
        start: the position of the continuation's first token.
        steps: one a token.
        greedy: whether the model chose the tokens (its likeliest ones), or they were given.
        ended: whether it ended the text itself, with an end-of-text token.
    """

    trace: Trace
    start: int
    steps: tuple[Step, ...]
    greedy: bool
    ended: bool

    def __repr__(self) -> str:
        return f"Generation of {self.trace.model.name!r}: {self.text!r} after {counted(self.start, 'token')}"

    def _repr_html_(self) -> str | None:
        return notebook_html("generation_html", self)

    @property
    def text(self) -> str:
        """The continuation."""
        return "".join(step.text for step in self.steps)

    def tokens(self) -> pd.DataFrame:
        """One row a step: ``step, position, token, text, probability, runner_up, runner_up_text, runner_up_probability,
        logit_difference`` (the model's own) and ``residual`` (its account's).
        """
        import pandas as pd

        rows = []
        for number, step in enumerate(self.steps):
            facts = {name: getattr(step, name) for name in Step.__dataclass_fields__ if name != "account"}
            measured = {"logit_difference": step.account.reading.actual, "residual": step.account.residual}
            rows.append({"step": number} | facts | measured)
        return self._named(pd.DataFrame(rows))

    def frame(self) -> pd.DataFrame:
        """Every step's account: its ledger's rows (``component, layer, head, source, kind, value``) after ``step`` and ``token``
        (text); a step's values sum to its logit difference.
        """
        import pandas as pd

        parts = []
        for number, step in enumerate(self.steps):
            rows = step.account.frame()
            rows.insert(0, "step", number)
            rows.insert(1, "token", step.text)
            rows.attrs = {}  # a step's own, which the whole does not share
            parts.append(rows)
        return self._named(pd.concat(parts, ignore_index=True))

    def heads(self) -> pd.DataFrame:
        """One row a step and head, its sources and value bias together: ``step, token, head, layer, index, value``, ``source``
        (the position it took most from, by size) and ``source_text``.
        """
        import pandas as pd

        rows = []
        for number, step in enumerate(self.steps):
            strongest = step.account.value_path.abs().argmax(-1)
            for head, value in zip(self.trace.model.heads(), step.account.heads.flatten().tolist(), strict=True):
                source = int(strongest[head.layer, head.index])
                place = (head.label, head.layer, head.index)
                rows.append((number, step.text, *place, value, source, self.trace.texts[source]))
        columns = ["step", "token", "head", "layer", "index", "value", "source", "source_text"]
        return self._named(pd.DataFrame(rows, columns=columns))

    def _named(self, frame: pd.DataFrame) -> pd.DataFrame:
        frame.attrs = {
            "model": self.trace.model.name,
            "bos_added": self.trace.bos_added,
            "tokens": list(self.trace.texts),
            "start": self.start,
            "greedy": self.greedy,
            "ended": self.ended,
        }
        return frame


def generate(
    model: Model,
    prompt: str | Sequence[int],
    n: int = 10,
    *,
    continuation: str | Sequence[int] | None = None,
    bos: bool | None = None,
) -> Generation:
    """Continue a prompt with the likeliest tokens, and account for each against its runner-up.

    Args:
        model: any view.
        prompt: text or token ids.
        n: how many tokens; fewer where the model ends the text itself.
        continuation: text or ids to account for instead of what the model would say; ``n`` does not count then.
        bos: as for :meth:`ov_circuits.Model.trace`.

    Returns:
        The continuation, one step a token, each with its account; ``.tokens()``, ``.heads()`` and ``.frame()`` are its frames.

    Raises:
        CircuitsError: as for a trace; n below 1, an empty continuation, or more tokens than the model reads.
    """
    tokens, added = prompt_ids(model, prompt, bos)
    greedy, start = continuation is None, len(tokens)
    if continuation is None:
        if isinstance(n, bool) or not hasattr(n, "__index__") or n < 1:
            raise CircuitsError(f"n = {n!r}: generate at least one token")
        if start + n > model.architecture.n_ctx:
            raise CircuitsError(
                f"{start} tokens of prompt and {n} more are beyond the {model.architecture.n_ctx} that {model.name} reads"
            )
        said = likeliest_continuation(model, tokens, n)
    else:
        said = _said(model, prompt, continuation)
        check_tokens(model, [*tokens, *said])
    whole = trace(model, [*tokens, *said], bos=False)
    assert isinstance(whole, Trace)
    whole = Trace(whole.model, whole.tokens, whole.texts, added, whole.record)
    return Generation(whole, start, _steps(whole, start), greedy, greedy and len(said) < n)


def _said(model: Model, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> list[int]:
    """The continuation's ids; of text after text, as the tokenizer reads the two together."""
    if not isinstance(continuation, str):
        said = whole_ids(continuation)
    elif not isinstance(prompt, str):
        said = model.tokenizer.encode(continuation)
    else:
        said = _after(model, prompt, continuation)
    if not said:
        raise CircuitsError("the continuation is empty: give it at least one token")
    return said


def _after(model: Model, prompt: str, continuation: str) -> list[int]:
    """A text's ids after another text."""
    if not continuation:
        return []
    before, together = model.tokenizer.encode(prompt), model.tokenizer.encode(prompt + continuation)
    if together[: len(before)] != before or len(together) == len(before):
        raise CircuitsError(
            "the tokenizer joins the continuation to the prompt's last token: begin it with the space that is between the two"
        )
    return together[len(before) :]


def _steps(whole: Trace, start: int) -> tuple[Step, ...]:
    found, readings = [], []
    for at, token in enumerate(whole.tokens[start:], start=start - 1):
        probabilities = whole.record.logits[at].double().softmax(-1)
        runner_up = next(other for other in whole.record.logits[at].topk(2).indices.tolist() if other != token)
        readings.append(logit_reading(whole, token, runner_up, at))
        found.append((at, token, float(probabilities[token]), runner_up, float(probabilities[runner_up])))
    model = whole.model
    return tuple(
        Step(at, token, token_text(model, token), share, other, token_text(model, other), other_share, account)
        for (at, token, share, other, other_share), account in zip(
            found, accounts([whole] * len(readings), readings), strict=True
        )
    )
