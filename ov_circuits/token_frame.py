"""Tables of tokens: frames that a notebook shows with every space of a token visible."""

from __future__ import annotations

import pandas as pd

from ov_circuits.shown import notebook_html


class TokenFrame(pd.DataFrame):
    """A plain frame; what is cut out of it stays one. A browser would drop the space that tells `` sol`` from ``sol``."""

    @property
    def _constructor(self) -> type[TokenFrame]:
        return TokenFrame

    def _repr_html_(self) -> str | None:
        return notebook_html("tokens_html", self)
