"""The names of a decoder's tensors in checkpoints: Hugging Face's names and GGUF's, by the part of the network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

# Tensors outside the layers, and those inside a layer: part, Hugging Face's name in Llama, GGUF's.
_TOP_LEVEL = (
    ("embedding", "model.embed_tokens", "token_embd"),
    ("final_norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
)
_IN_A_LAYER = (
    ("attention_norm", "input_layernorm", "attn_norm"),
    ("q", "self_attn.q_proj", "attn_q"),
    ("k", "self_attn.k_proj", "attn_k"),
    ("v", "self_attn.v_proj", "attn_v"),
    ("qkv", "self_attn.qkv_proj", "attn_qkv"),
    ("q_a", "self_attn.q_a_proj", "attn_q_a"),
    ("q_a_norm", "self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("q_b", "self_attn.q_b_proj", "attn_q_b"),
    ("kv_a", "self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("kv_a_norm", "self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("kv_b", "self_attn.kv_b_proj", "attn_kv_b"),
    ("k_b", "self_attn.k_b_proj.*", "attn_k_b"),
    ("v_b", "self_attn.v_b_proj.*", "attn_v_b"),
    ("q_norm", "self_attn.q_norm", "attn_q_norm"),
    ("k_norm", "self_attn.k_norm", "attn_k_norm"),
    ("output", "self_attn.o_proj", "attn_output"),
    ("attention_post_norm", "post_attention_layernorm", "post_attention_norm"),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm"),
    ("gate", "mlp.gate_proj", "ffn_gate"),
    ("up", "mlp.up_proj", "ffn_up"),
    ("gate_up", "mlp.gate_up_proj", "ffn_up"),
    ("down", "mlp.down_proj", "ffn_down"),
    ("activation", "mlp.act_fn", "xielu"),
    ("sinks", "self_attn.sinks", "attn_sinks"),
    ("router", "mlp.gate", "ffn_gate_inp"),
    ("router_correction", "mlp.gate.e_score_correction", "exp_probs_b"),
    ("expert_gate", "mlp.experts.*.gate_proj", "ffn_gate_exps"),
    ("expert_up", "mlp.experts.*.up_proj", "ffn_up_exps"),
    ("expert_down", "mlp.experts.*.down_proj", "ffn_down_exps"),
    ("shared_gate", "mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("shared_up", "mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("shared_down", "mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("shared_expert_gate", "mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp_post_norm", "post_feedforward_layernorm", "post_ffw_norm"),
)
_HF = {part: name for part, name, _ in (*_TOP_LEVEL, *_IN_A_LAYER)}
_IN_LAYERS = frozenset(part for part, _, _ in _IN_A_LAYER)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A family's names.

    Attributes:
        changed: parts that Hugging Face's checkpoints of this family call otherwise than Llama's. A star stands for the
            number of an expert or of a head; brackets select from a tensor (`models/weights.py`).
        fused: "qkv", "gate_up" and "kv_b", as far as the family stores these projections as one matrix.
        layers: what Hugging Face's names of tensors in layers begin with.
        gguf: parts that GGUF's files of this family call otherwise than Llama's.
    """

    changed: Mapping[str, str] = field(default_factory=dict)
    fused: Set[str] = frozenset()
    layers: str = "model.layers"
    gguf: Mapping[str, str] = field(default_factory=dict)

    def hf(self, part: str, layer: int | None = None, expert: int | None = None) -> str:
        """Hugging Face's name of a part without its ending: hf("q", 3) -> 'model.layers.3.self_attn.q_proj'."""
        name = self.changed.get(part) or _HF[part]
        name = name if expert is None else name.replace("*", str(expert))
        return name if layer is None else f"{self.layers}.{layer}.{name}"

    def from_gguf(self, name: str) -> str | None:
        """Hugging Face's name of a GGUF tensor, 'blk.3.attn_q.weight' for example, with a star where it holds those of
        all experts or heads; None if the decoder has no such tensor."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None:
            return None
        layer = None if match[1] is None else int(match[1])
        for part, _, gguf in _TOP_LEVEL if layer is None else _IN_A_LAYER:
            if self.gguf.get(part, gguf) == match[2] and not self._is_stored_otherwise(part):
                return f"{self.hf(part, layer)}.{match[3]}"
        return None

    def part_of(self, hf_name: str) -> str | None:
        """The part that a tensor of one of Hugging Face's names belongs to, within a layer; None if there is none."""
        match = re.fullmatch(rf"{re.escape(self.layers)}\.\d+\.(.+)\.(?:weight|bias)", hf_name)
        named = {self.hf(part): part for part in _IN_LAYERS if not self._is_stored_otherwise(part)}
        return named.get(match[1]) if match else None

    def _is_stored_otherwise(self, part: str) -> bool:
        """Whether the family stores a part within a fused matrix, or apart from one."""
        if part in ("qkv", "gate_up"):
            return part not in self.fused
        if part in ("k_b", "v_b", "kv_b"):
            return (part == "kv_b") != ("kv_b" in self.fused)
        return (part in "qkv" and "qkv" in self.fused) or (part in ("gate", "up") and "gate_up" in self.fused)
