"""A model of one's own: a TOML file in this suite's words, or the config.json of a checkpoint in its family's. Pure."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from parbench.bench.files import convert_read_errors, decode_json, read_text, read_toml
from parbench.bench.text import UserError, format_list, suggest_similar
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe, make_moe
from parbench.workloads.expert_parallel.routing import BALANCED
from parbench.workloads.model.shapes import (
    MAX_SIZE,
    Bias,
    Latent,
    Recipe,
    Shape,
    Size,
    SizeOrZero,
    require_shape,
)


class Mixture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixture of experts, in the words of ``Moe``."""

    experts: Size
    top_k: Size
    expert_ffn: Size
    shared: SizeOrZero = 0
    dense_layers: SizeOrZero = 0
    shared_gate: bool = False


ModelFile = msgspec.defstruct(
    "ModelFile",
    [
        ("name", str),
        *(
            (one.name, one.type)
            for one in fields(Shape)
            if one.default is MISSING and one.name != "recipe"
        ),
        ("recipe", Recipe, "llama"),
        *((one.name, one.type, one.default) for one in fields(Shape) if one.default is not MISSING),
        ("mixture", Mixture | None, None),
    ],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
)
"""A ``.toml`` file: the fields of ``Shape`` and a table ``[mixture]``; ``recipe`` is llama if it says none."""


class Model(NamedTuple):
    """A model as a step on no mesh, and what a reader must know of how it was read."""

    step: StepSpec
    notes: tuple[str, ...] = ()


def step_of(name: str, shape: Shape, mixture: Mixture | None = None) -> StepSpec:
    """Return a model as a step on no mesh, its experts whole and routed evenly; ``UserError`` by equation."""
    require_shape(shape)
    return StepSpec(name=name, shape=shape, moe=_moe_of(mixture, shape) if mixture else None)


def _moe_of(mixture: Mixture, shape: Shape) -> Moe:
    if mixture.dense_layers > shape.layers:
        raise UserError(f"dense_layers({mixture.dense_layers}) > layers({shape.layers})")
    given = msgspec.structs.asdict(mixture)
    own = {name: given.pop(name) for name in ("dense_layers", "shared_gate")}
    return replace(make_moe({**given, "routing": BALANCED}, shape, 1), **own)


def read_model(path: Path) -> Model:
    """Return the model of a ``.toml`` or ``.json`` file; ``UserError`` names the file, the key and what is allowed."""
    if path.suffix == ".json":
        return _read_config(path)
    found = msgspec.structs.asdict(read_toml(path, "model file", ModelFile, name=path.stem))
    name, mixture = found.pop("name"), found.pop("mixture")
    return Model(_step_in(path, name, Shape(**found), mixture))


def _step_in(path: Path, name: str, shape: Shape, mixture: Mixture | None) -> StepSpec:
    try:
        return step_of(name, shape, mixture)
    except UserError as error:
        raise UserError(f"model file {path}: {error}") from error


_ATTENTION: tuple[Bias, ...] = ("q", "k", "v", "out")


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What the models of one ``model_type`` have; ``keys`` are its words for those of Llama's.

    ``biases`` are always there, ``flags`` where a key says so, which is their default. ``experts`` is the key of their
    number, ``shared`` of how many all tokens take, or of the inner size of them all.
    """

    recipe: Recipe = "llama"
    keys: Mapping[str, str] = field(default_factory=dict)
    biases: tuple[Bias, ...] = ()
    flags: Mapping[str, tuple[bool, tuple[Bias, ...]]] = field(default_factory=dict)
    tied: bool = False
    qk_norm: bool = False
    sinks: bool = False
    learned_positions: bool | None = None
    latent: bool = False
    experts: str = ""
    expert_ffn: str = "moe_intermediate_size"
    shared: str = ""
    shared_gate: bool = False


_BIASED = {"attention_bias": (False, _ATTENTION)}
_GPT2 = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_DEEPSEEK: dict[str, Any] = {
    "latent": True,
    "experts": "n_routed_experts",
    "shared": "n_shared_experts",
}
# as of the configuration classes of transformers 4.57
_FAMILIES = {
    "llama": _Family(flags={**_BIASED, "mlp_bias": (False, ("ffn",))}),
    "mistral": _Family(),
    "mixtral": _Family(experts="num_local_experts", expert_ffn="intermediate_size"),
    "qwen2": _Family(biases=("q", "k", "v")),
    "qwen2_moe": _Family(
        biases=("q", "k", "v"),
        experts="num_experts",
        shared="shared_expert_intermediate_size",
        shared_gate=True,
    ),
    "qwen3": _Family(qk_norm=True, flags=_BIASED),
    "qwen3_moe": _Family(qk_norm=True, flags=_BIASED, experts="num_experts"),
    "deepseek_v2": _Family(**_DEEPSEEK),
    "deepseek_v3": _Family(**_DEEPSEEK, biases=("router",)),
    "gpt2": _Family(recipe="gpt", keys=_GPT2, biases=(*_ATTENTION, "ffn"), tied=True),
    "gpt_neox": _Family(
        recipe="gpt",
        learned_positions=False,
        biases=("ffn",),
        flags={"attention_bias": (True, _ATTENTION)},
    ),
    "gpt_oss": _Family(
        biases=("router", "experts"),
        flags={"attention_bias": (True, _ATTENTION)},
        sinks=True,
        experts="num_local_experts",
        expert_ffn="intermediate_size",
    ),
}
# what changes no size, nor how often anything is computed or sent
_WITHOUT_COST = """
_name_or_path activation_function architectures attention_dropout attention_probs_dropout_prob attn_pdrop auto_map
aux_loss_alpha bos_token_id classifier_dropout dtype embd_pdrop eos_token_id ep_size experts_per_token hidden_act
hidden_dropout hidden_dropout_prob initial_context_length initializer_range layer_norm_eps layer_norm_epsilon
max_window_layers model_type n_ctx n_group norm_topk_prob output_attentions output_router_logits pad_token_id
partial_rotary_factor pretraining_tp reorder_and_upcast_attn resid_pdrop rms_norm_eps rope_parameters rope_scaling
rope_theta rotary_emb_base rotary_pct routed_scaling_factor router_aux_loss_coef router_jitter_noise
scale_attn_by_inverse_layer_idx scale_attn_weights scoring_func seq_aux summary_activation summary_first_dropout
summary_proj_to_labels summary_type summary_use_proj swiglu_limit task_specific_params topk_group topk_method
torch_dtype transformers_version use_cache use_parallel_residual use_sliding_window
"""


class _Keys:
    """The keys of a config.json as they are asked for, and which were."""

    def __init__(self, path: Path, content: Mapping[str, Any], family: _Family) -> None:
        self.path, self.content, self.family = path, content, family
        self.asked: set[str] = set()

    def size(self, key: str, otherwise: int | None = None, *, least: int = 1) -> int:
        """Return a whole number, ``otherwise`` where the key is not there or null."""
        key = self.family.keys.get(key, key)
        self.asked.add(key)
        value = self.content.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if value is None:
            raise UserError(
                f"model file {self.path} has no {key}, which a {self.content['model_type']} has"
            )
        if type(value) is not int or not least <= value <= MAX_SIZE:
            raise UserError(
                f"model file {self.path}: {key} = {value!r} is no whole number from {least} to {MAX_SIZE}"
            )
        return value

    def flag(self, key: str, otherwise: bool) -> bool:
        self.asked.add(key)
        value = self.content.get(key, otherwise)
        if not isinstance(value, bool):
            raise UserError(f"model file {self.path}: {key} = {value!r} is not true or false")
        return value

    @property
    def unread(self) -> list[str]:
        """What says something and was not asked for."""
        windowed = self.content.get("use_sliding_window", True)
        said = {
            key for key, value in self.content.items() if value not in (None, False, [], {}, "")
        }
        unused = () if windowed else ("sliding_window", "layer_types")
        return sorted(said - self.asked.union(_WITHOUT_COST.split(), unused))


def _read_config(path: Path) -> Model:
    text = read_text(str(path), f"model file {path}")
    with convert_read_errors(f"model file {path}", "is no JSON"):
        content = decode_json(text.encode(), object)
    if not isinstance(content, dict):
        raise UserError(
            f"model file {path} is no JSON object of keys such as model_type and num_hidden_layers"
        )
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        hint = suggest_similar(str(kind), _FAMILIES)
        raise UserError(
            f"model file {path}: model_type {kind!r} is not {format_list(_FAMILIES)}{hint}"
        )
    keys = _Keys(path, content, _FAMILIES[kind])
    shape = _shape_in(keys)
    mixture = _mixture_in(keys, shape)
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    step = _step_in(path, name, shape, mixture)
    return Model(
        step, (f"{path}: not taken into account: {', '.join(keys.unread)}",) if keys.unread else ()
    )


def _shape_in(keys: _Keys) -> Shape:
    family, hidden, heads = keys.family, keys.size("hidden_size"), keys.size("num_attention_heads")
    biases = [*family.biases]
    for key, (otherwise, parts) in family.flags.items():
        biases += parts if keys.flag(key, otherwise) else ()
    latent = None
    if family.latent:
        ranks = {"q_lora_rank": keys.size("q_lora_rank", 0)}
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = Latent(**ranks, **{key: keys.size(key) for key in sizes})
        keys.asked.add("head_dim")
    return Shape(
        recipe=family.recipe,
        layers=keys.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if family.recipe == "gpt" else keys.size("num_key_value_heads", heads),
        ffn=keys.size("intermediate_size", 4 * hidden if family.keys else None),
        sequence=keys.size("max_position_embeddings"),
        vocabulary=keys.size("vocab_size"),
        head_dim=0 if latent else keys.size("head_dim", 0),
        tied=keys.flag("tie_word_embeddings", family.tied),
        biases=tuple(biases),
        qk_norm=family.qk_norm,
        sinks=family.sinks,
        learned_positions=family.learned_positions,
        latent=latent,
    )


def _mixture_in(keys: _Keys, shape: Shape) -> Mixture | None:
    family = keys.family
    experts = keys.size(family.experts, 0) if family.experts else 0
    if not experts:
        return None
    for key in ("moe_layer_freq", "decoder_sparse_step"):
        if keys.size(key, 1) != 1:
            raise UserError(
                f"model file {keys.path}: {key} = {keys.content[key]} is not 1: layers are alike here but for the first"
            )
    dense = keys.size("first_k_dense_replace", 0, least=0) if family.latent else 0
    alone = keys.content.get("mlp_only_layers") or []
    keys.asked.add("mlp_only_layers")
    if alone:
        if alone != list(range(len(alone))):
            raise UserError(
                f"model file {keys.path}: mlp_only_layers = {alone} are not the first layers"
            )
        dense = len(alone)
    inner = keys.size(family.expert_ffn)
    shared = keys.size(family.shared, 0, least=0) if family.shared else 0
    if family.shared_gate:
        if shared % inner:
            raise UserError(
                f"model file {keys.path}: {family.shared}({shared}) % {family.expert_ffn}({inner}) != 0"
            )
        shared //= inner
    return Mixture(
        experts=experts,
        top_k=keys.size("num_experts_per_tok"),
        expert_ffn=inner,
        shared=shared,
        dense_layers=dense,
        shared_gate=family.shared_gate and shared > 0,
    )
