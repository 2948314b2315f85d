from collections.abc import Callable, Sequence

from torch import Tensor

# Floats, or a codec, its codes, scales of vectors, zero points and scales of heads.
_Side = Tensor | tuple[str, Tensor, Tensor | None, Tensor | None, Tensor | None]

def attend(
    keys: _Side,
    values: _Side,
    query: Tensor,
    out: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    exact: bool,
    copies: tuple[_Side, _Side, Tensor, int, int] | None,
    apart: tuple[Tensor, Tensor, int] | None,
    sparse: tuple[Tensor, tuple[Tensor, Tensor, list[Tensor]]] | None,
    measured: tuple[Tensor, Tensor] | None,
) -> None: ...
def rope_write(
    qkv: Tensor,
    keys: _Side,
    values: _Side,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    copies: tuple[_Side, _Side, Tensor] | None,
) -> None: ...
def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None: ...
def gated(gate_up: Tensor, out: Tensor, activation: str) -> None: ...
def argmax(logits: Tensor, out: Tensor) -> None: ...
def draw_tokens(
    logits: Tensor,
    rows: Tensor,
    numbers: Tensor,
    allowed: Tensor | None,
    mask_of: Tensor | None,
    token_ids: Tensor,
    sound: Tensor,
) -> None: ...
def penalise_repetition(
    logits: Tensor, rows: Tensor, bounds: Tensor, num_sorted: Tensor, token_ids: Tensor, penalties: Tensor
) -> None: ...
def add_amounts(logits: Tensor, rows: Tensor, bounds: Tensor, token_ids: Tensor, amounts: Tensor) -> None: ...
def score_tokens(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_top: Tensor,
    logprobs: Tensor,
    ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
) -> None: ...
def packed_bytes(format: str, outputs: int, inputs: int) -> int: ...
def pack_rows(
    format: str, packed: Tensor, outputs: int, inputs: int, rows: Tensor, first_output: int, step: int
) -> None: ...
def plan_compression(packed: Tensor, outputs: int, inputs: int) -> tuple[int, int, int]: ...
def compress(packed: Tensor, outputs: int, inputs: int, base: int, num_escapes: int, out: Tensor) -> None: ...
def copy_packed(source: Tensor, target: Tensor) -> None: ...
def unpack_rows(format: str, packed: Tensor, outputs: int, inputs: int, ids: Tensor, out: Tensor) -> None: ...
def linear(
    format: str, packed: Tensor, outputs: int, x: Tensor, bias: Tensor | None, out: Tensor, activation: str, exact: bool
) -> None: ...
def merges_by_score(pieces: list[str], scores: list[float]) -> list[tuple[str, str]]: ...
def read_strings(stored: bytes, count: int) -> list[str]: ...
def isa() -> str: ...
def supported_isas() -> list[str]: ...
def force_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...

_Part = tuple[str, Tensor, int, int, Tensor | None]

_Norm = tuple[Tensor, Tensor | None, float, bool]  # weight, bias, eps, centred

_Columns = list[int]

def rank_memory_bytes(message_bytes: int, slot_bytes: int, logits_bytes: int) -> int: ...
def step_message_bytes(
    num_tokens: int, num_seqs: int, num_groups: int, max_blocks: int, rotation_bytes: int
) -> int: ...

class Ranks:
    timeout_seconds: float
    num_threads: int
    def __init__(
        self,
        file: int,
        message_bytes: int,
        slot_bytes: int,
        logits_bytes: int,
        rank: int,
        count: int,
        machines: int,
        timeout_seconds: float,
    ) -> None: ...
    def set_link(
        self, gather: Callable[[memoryview, memoryview], None], broadcast: Callable[[memoryview], None]
    ) -> None: ...
    def copy(self, from_host: bool, to_host: bool, ids: list[tuple[int, int]]) -> None: ...
    def fail(self, reason: str) -> None: ...
    def reset(self) -> None: ...
    @property
    def failure(self) -> str: ...

class Decoder:
    def __init__(
        self,
        dtype: str,
        hidden: int,
        vocab: int,
        num_heads: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        attention_scale: float,
        attention_softcap: float,
        logits_scale: float,
        logits_softcap: float,
    ) -> None: ...
    def norm(
        self, source: str, target: str, weights: _Norm | None, added: str | None, first: int, width: int
    ) -> None: ...
    def add(self, target: str, source: str) -> None: ...
    def scale(self, place: str, factor: float) -> None: ...
    def multiply(
        self, parts: list[_Part], source: str, target: str, gate: str, columns: _Columns | None = None
    ) -> None: ...
    def multiply_heads(self, heads: list[_Part], source: str, target: str, kept: int, latent: str | None) -> None: ...
    def activate(self, place: str, activation: str, parameters: Sequence[float]) -> None: ...
    def attend(
        self,
        rotation: int,
        query_norm: _Norm | None,
        key_norm: _Norm | None,
        rotates_first: bool,
        sinks: Tensor | None,
        columns: _Columns | None = None,
    ) -> None: ...
    def scale_by_sigmoid(self, parts: list[_Part], source: str, place: str) -> None: ...
    def mix(
        self,
        router: list[_Part],
        bias: Tensor | None,
        choice: tuple[int, bool, bool, bool, float, int, int],
        gate_up: list[_Part],
        down: list[_Part],
        source: str,
        target: str,
        gate: str,
        inner_columns: _Columns | None = None,
        columns: _Columns | None = None,
    ) -> None: ...
    def gather(self, place: str) -> None: ...
    def set_ranks(self, ranks: Ranks, ids: list[int], group: int) -> None: ...
    def follow(self, device: Tensor, host: Tensor) -> None: ...
    def keep_rows(self, place: str) -> None: ...
    def set_ends(self, embedding_rows: Tensor | None, embedding: list[_Part], head: list[_Part]) -> None: ...
    def set_exact(self, exact: bool) -> None: ...
    def set_caches(
        self,
        caches: list[
            tuple[
                _Side,
                _Side,
                int,
                int,
                tuple[_Side, _Side, int, int, int] | None,
                Tensor | None,
            ]
        ],
    ) -> None: ...
    def logits(self, first: int, out: Tensor) -> None: ...
    def hidden(self, first: int, out: Tensor) -> None: ...
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        table_rows: Tensor,
        groups: list[tuple[Tensor, Tensor]],
        rotations: list[tuple[Tensor, Tensor]],
        logits_indices: Tensor,
        logits: Tensor,
        budgets: Tensor | None = None,
        sink_positions: Tensor | None = None,
        sink_tokens: int = 1,
        sparse: tuple[Tensor, Tensor, list[Tensor]] | None = None,
        kept: list[Tensor | None] = ...,
        measured: tuple[Tensor, Tensor] | None = None,
    ) -> None: ...
