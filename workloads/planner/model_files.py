"""The model of a checkpoint's config.json. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parbench.bench.files import convert_read_errors, decode_json
from parbench.bench.text import UserError, format_list
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.expert_parallel.moe_case import Moe, make_moe
from parbench.workloads.expert_parallel.routing import BALANCED
from parbench.workloads.model.shapes import (
    MAX_SIZE,
    Bias,
    Latent,
    Recipe,
    Shape,
    require_shape,
)

Mixture = Mapping[str, int]
"""The sizes of a mixture of experts by name: ``experts``, ``top_k``, ``expert_ffn``, ``shared``
(the number of shared experts) and ``dense_layers`` (the number of leading layers with an FFN)."""


def make_model_step(name: str, shape: Shape, mixture: Mixture | None = None) -> StepSpec:
    """Return a training step of a model on one rank, with default settings and balanced routing.

    ``mixture`` is None for a dense model. Raises ``UserError`` with the equation that the sizes do
    not satisfy.
    """
    require_shape(shape)
    return StepSpec(name=name, shape=shape, moe=_make_moe(mixture, shape) if mixture else None)


def _make_moe(mixture: Mixture, shape: Shape) -> Moe:
    """Return the mixture of experts of a model, with all experts on one rank.

    Raises ``UserError`` if the sizes in ``mixture`` contradict each other or those in ``shape``.
    """
    params: dict[str, Any] = {"shared": 0, "routing": BALANCED, **mixture}
    dense_layers = params.pop("dense_layers", 0)
    if dense_layers > shape.layers:
        raise UserError(f"dense_layers({dense_layers}) > layers({shape.layers})")
    return replace(make_moe(params, shape, 1), dense_layers=dense_layers)


_ATTENTION: tuple[Bias, ...] = ("q", "k", "v", "out")  # the weight matrices of attention


@dataclass(frozen=True, kw_only=True)
class _Family:
    """The architecture of a ``model_type`` of Hugging Face, and its keys in config.json."""

    recipe: Recipe = "llama"
    """The layout of a layer, as in Llama or in GPT."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The key of a size in config.json of this family, keyed by Llama's key for this size.

    Sizes that are missing here have Llama's key.
    """
    biases: tuple[Bias, ...] = ()
    """The weight matrices that always have a bias."""
    flags: Mapping[str, tuple[Bias, ...]] = field(default_factory=dict)
    """For each boolean key of config.json, the weight matrices that have a bias if it is true."""
    tied: bool = False
    """The value of ``tie_word_embeddings`` if config.json lacks the key.

    True means that the language model's head shares the weights of the embedding.
    """
    qk_norm: bool = False
    """True if queries and keys are normalized."""
    latent: bool = False
    """True for multi-head latent attention."""
    experts: str = ""
    """The key with the number of routed experts, empty for a dense model."""
    expert_ffn: str = "moe_intermediate_size"
    """The key with the inner (FFN) size of an expert."""
    shared: str = ""
    """The key with the number of shared experts, empty if the family has none."""


_BIASED = {"attention_bias": _ATTENTION}
# The keys of sizes in config.json of GPT-2, by Llama's keys.
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
# The architectures by ``model_type``, from the configuration classes of transformers 4.57.
_FAMILIES = {
    "llama": _Family(flags={**_BIASED, "mlp_bias": ("ffn",)}),
    "mistral": _Family(),
    "mixtral": _Family(experts="num_local_experts", expert_ffn="intermediate_size"),
    "olmo": _Family(flags=_BIASED),
    "olmo2": _Family(qk_norm=True, flags=_BIASED),
    "gemma2": _Family(tied=True, flags=_BIASED),
    "qwen2": _Family(biases=("q", "k", "v")),
    "qwen3": _Family(qk_norm=True, flags=_BIASED),
    "qwen3_moe": _Family(qk_norm=True, flags=_BIASED, experts="num_experts"),
    "deepseek_v2": _Family(**_DEEPSEEK),
    "deepseek_v3": _Family(**_DEEPSEEK, biases=("router",)),
    "gpt2": _Family(recipe="gpt", keys=_GPT2, biases=(*_ATTENTION, "ffn"), tied=True),
}


class _Config:
    """The content of a config.json, with methods that check values."""

    def __init__(self, content: Mapping[str, Any], family: _Family) -> None:
        """Keep the values of config.json by key, and the architecture with its keys."""
        self.content = content
        self.family = family

    def read_size(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return the whole number of a key, or ``default`` if the key is missing or null.

        ``key`` is Llama's key, which is translated to the key of the family. Raises ``UserError``
        if the number is below ``minimum`` or above ``MAX_SIZE``. It is also raised if the key is
        missing and ``default`` is None.
        """
        key = self.family.keys.get(key, key)
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            model_type = self.content["model_type"]
            raise UserError(f"{key} is missing: a {model_type} needs it")
        if type(value) is not int or not minimum <= value <= MAX_SIZE:
            allowed = f"a whole number from {minimum} to {MAX_SIZE}"
            raise UserError(f"{key} = {value!r} is not {allowed}")
        return value

    def read_flag(self, key: str, default: bool = False) -> bool:
        """Return the boolean of a key, or ``default`` if the key is missing.

        Raises ``UserError`` if the value is not a boolean.
        """
        value = self.content.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{key} = {value!r} is not true or false")
        return value


def read_model(path: Path) -> StepSpec:
    """Return the training step of the model that a config.json of Hugging Face describes.

    The step is on one rank, with default settings. Keys that are not needed are ignored. Raises
    ``UserError`` with the file, the key and the allowed values if the model cannot be read.
    """
    with convert_read_errors(f"model file {path}", "is not JSON"):
        content = decode_json(path.read_bytes(), object)
    if not isinstance(content, dict):
        example = "with keys such as model_type and num_hidden_layers"
        raise UserError(f"model file {path} is not a JSON object {example}")
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        allowed = format_list(_FAMILIES)
        raise UserError(f"model file {path}: model_type {model_type!r} is not {allowed}")
    config = _Config(content, _FAMILIES[model_type])
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    try:
        return make_model_step(name, _read_shape(config), _read_mixture(config))
    except UserError as error:
        raise UserError(f"model file {path}: {error}") from error


def _read_shape(config: _Config) -> Shape:
    """Return the sizes of the layers, embedding and head of the model in a config.json."""
    family = config.family
    hidden = config.read_size("hidden_size")
    heads = config.read_size("num_attention_heads")
    biases = list(family.biases)
    for key, parts in family.flags.items():
        if config.read_flag(key):
            biases += parts
    latent = _read_latent(config) if family.latent else None
    return Shape(
        recipe=family.recipe,
        layers=config.read_size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads
        if family.recipe == "gpt"
        else config.read_size("num_key_value_heads", heads),
        ffn=config.read_size("intermediate_size", 4 * hidden if family.keys else None),
        sequence=config.read_size("max_position_embeddings"),
        vocabulary=config.read_size("vocab_size"),
        head_dim=0 if latent else config.read_size("head_dim", 0),
        tied=config.read_flag("tie_word_embeddings", family.tied),
        biases=tuple(biases),
        qk_norm=family.qk_norm,
        latent=latent,
    )


def _read_latent(config: _Config) -> Latent:
    """Return the sizes of multi-head latent attention in a config.json."""
    return Latent(
        q_lora_rank=config.read_size("q_lora_rank", 0),
        kv_lora_rank=config.read_size("kv_lora_rank"),
        qk_nope_head_dim=config.read_size("qk_nope_head_dim"),
        qk_rope_head_dim=config.read_size("qk_rope_head_dim"),
        v_head_dim=config.read_size("v_head_dim"),
    )


def _read_mixture(config: _Config) -> Mixture | None:
    """Return the sizes of the mixture of experts in a config.json, None for a dense model.

    The keys of the result are those of ``Mixture``: experts, top_k, expert_ffn, shared and
    dense_layers. Raises ``UserError`` if a dense layer (with an FFN in place of experts) follows a
    layer with experts.
    """
    family = config.family
    experts = config.read_size(family.experts, 0) if family.experts else 0
    if not experts:
        return None
    for key in ("moe_layer_freq", "decoder_sparse_step"):
        if config.read_size(key, 1) != 1:
            value = config.content[key]
            reason = "only the first layers may have no experts"
            raise UserError(f"{key} = {value} is not 1: {reason}")
    dense_layers = 0
    if family.latent:
        dense_layers = config.read_size("first_k_dense_replace", 0, minimum=0)
    mlp_only = config.content.get("mlp_only_layers") or []
    if mlp_only:
        if mlp_only != list(range(len(mlp_only))):
            raise UserError(f"mlp_only_layers = {mlp_only} are not the first layers")
        dense_layers = len(mlp_only)
    return {
        "experts": experts,
        "top_k": config.read_size("num_experts_per_tok"),
        "expert_ffn": config.read_size(family.expert_ffn),
        "shared": config.read_size(family.shared, 0, minimum=0) if family.shared else 0,
        "dense_layers": dense_layers,
    }
