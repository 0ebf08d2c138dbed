"""The recurrent core: an LSTM or GRU layer whose rows are reset at episode starts.

One step is one cell. A chunk of T steps is cut where any row starts an episode; each segment is one fused call:

    first   . . . . x . . .      a row starts an episode at step 4
    calls   |-- 4 --|-- 4 --|    the state of that row is zeroed in between
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from tiltyard.models.layers import orthogonal_

State = dict[str, Tensor]


class Core(nn.Module):
    """State is {"h": [B, size]} for a GRU and {"h", "c"} for an LSTM."""

    def __init__(self, inputs: int, size: int, kind: Literal["lstm", "gru"]) -> None:
        super().__init__()
        self.size = size
        self.kind = kind
        self.layer: nn.LSTM | nn.GRU = nn.LSTM(inputs, size) if kind == "lstm" else nn.GRU(inputs, size)
        for name, parameter in self.layer.named_parameters():
            if name.startswith("weight"):
                orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)

    @property
    def names(self) -> tuple[str, ...]:
        return ("h", "c") if self.kind == "lstm" else ("h",)

    def initial_state(self, rows: int) -> State:
        device = self.layer.all_weights[0][0].device
        return {name: torch.zeros(rows, self.size, device=device) for name in self.names}

    def forward(self, x: Tensor, state: State, first: Tensor) -> tuple[Tensor, State]:
        """One step: x [B, inputs], first [B] bool -> [B, size] and the next state."""
        return self._cell(x, _reset_rows(state, first) if first.any() else state)

    def unroll(
        self, x: Tensor, state: State, first: Tensor, starts: Collection[int] | None = None
    ) -> tuple[Tensor, State]:
        """A chunk: x [T, B, inputs], first [T, B] bool -> [T, B, size] and the next state.

        `starts` are the steps at which any row has `first`; without them an accelerator must be waited for.
        """
        starts = torch.nonzero(first.any(1)).flatten().tolist() if starts is None else starts
        outs = []
        for begin, end in pairwise(sorted({0, x.shape[0], *starts})):
            if begin in starts:
                state = _reset_rows(state, first[begin])
            if end - begin == 1:
                out, state = self._cell(x[begin], state)
                outs.append(out.unsqueeze(0))
            else:
                out, state = self._run_segment(x[begin:end], state)
                outs.append(out)
        return (outs[0] if len(outs) == 1 else torch.cat(outs)), state

    def _cell(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One step without resets."""
        into, across, bias_into, bias_across = self.layer._parameters.values()
        assert into is not None and across is not None
        if self.kind == "lstm":
            h, c = torch.lstm_cell(x, (state["h"], state["c"]), into, across, bias_into, bias_across)
            return h, {"h": h, "c": c}
        h = torch.gru_cell(x, state["h"], into, across, bias_into, bias_across)
        return h, {"h": h}

    def _run_segment(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Steps without an episode start, in one fused call."""
        h = state["h"].unsqueeze(0).contiguous()
        if self.kind == "lstm":
            out, (h, c) = self.layer(x, (h, state["c"].unsqueeze(0).contiguous()))
            return out, {"h": h[0], "c": c[0]}
        out, h = self.layer(x, h)
        return out, {"h": h[0]}


def _reset_rows(state: State, first: Tensor) -> State:
    """Zero the state of rows that start an episode."""
    keep = (~first).to(torch.float32).unsqueeze(-1)
    return {name: memory * keep for name, memory in state.items()}
