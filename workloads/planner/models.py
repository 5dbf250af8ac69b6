"""The named models of the planner, each as a step without a mesh. Pure."""

from dataclasses import replace
from pathlib import Path

from parbench.bench.text import UserError, format_list
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES, Latent, Shape
from parbench.workloads.planner.model_files import make_model_step, read_model

_LLAMA_405B = Shape("llama", 126, 16384, 128, 8, 53248, 8192, 128256)
_DEEPSEEK_V3 = Shape(
    "llama",
    61,
    7168,
    128,
    128,
    18432,
    4096,
    129280,
    biases=("router",),
    latent=Latent(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
)
_DENSE_MODELS = {  # recipe, layers, hidden, heads, kv_heads, ffn, sequence, vocabulary
    **SHAPES,
    # arXiv 2407.21783, table 3: trained with 8,192 tokens, then with more
    "llama3-405b": _LLAMA_405B,
    "llama3.1-405b": replace(_LLAMA_405B, sequence=131072),
    # arXiv 2104.04473, tables 1 and 2, with the dropout of arXiv 2205.05198
    "gpt-7.5b": Shape("gpt", 36, 4096, 32, 32, 16384, 2048, 51200, dropout=True),
    "gpt-175b": Shape("gpt", 96, 12288, 96, 96, 49152, 2048, 51200, dropout=True),
    "gpt-530b": Shape("gpt", 105, 20480, 128, 128, 81920, 2048, 51200, dropout=True),
    "gpt-1t": Shape("gpt", 128, 25600, 160, 160, 102400, 2048, 51200, dropout=True),
    # arXiv 2402.00838, table 1
    "olmo-7b": Shape("llama", 32, 4096, 32, 32, 11008, 2048, 50304),
    # arXiv 2403.04652, table 1
    "yi-34b": Shape("llama", 60, 7168, 56, 8, 20480, 4096, 64000),
    # arXiv 2401.02954, table 2
    "deepseek-67b": Shape("llama", 95, 8192, 64, 8, 22016, 4096, 102400),
    # arXiv 2408.00118, table 1: half of its layers attend to 4,096 tokens, here all attend to all
    "gemma2-27b": Shape("llama", 46, 4608, 32, 16, 36864, 8192, 256128, head_dim=128, tied=True),
    # arXiv 2505.09388, table 1: trained with 4,096 tokens, then with 32,768
    "qwen3-32b": Shape("llama", 64, 5120, 64, 8, 25600, 4096, 151936, head_dim=128, qk_norm=True),
}
_MOE_MODELS = {  # the sizes of a dense model, and those of its mixture of experts
    # arXiv 2401.04088, table 1
    "mixtral-8x7b": (
        Shape("llama", 32, 4096, 32, 8, 14336, 8192, 32000),
        {"experts": 8, "top_k": 2, "expert_ffn": 14336},
    ),
    # arXiv 2505.09388, table 2
    "qwen3-235b-a22b": (
        Shape("llama", 94, 4096, 64, 4, 12288, 4096, 151936, head_dim=128, qk_norm=True),
        {"experts": 128, "top_k": 8, "expert_ffn": 1536},
    ),
    # arXiv 2412.19437, section 4.2, without the module that predicts a second token
    "deepseek-v3": (
        _DEEPSEEK_V3,
        {"experts": 256, "top_k": 8, "expert_ffn": 2048, "shared": 1, "dense_layers": 3},
    ),
}
MODELS: dict[str, StepSpec] = {
    **{name: make_model_step(name, shape) for name, shape in _DENSE_MODELS.items()},
    **{name: make_model_step(name, *sizes) for name, sizes in _MOE_MODELS.items()},
}
"""The known models by name, each as a training step on one rank with default settings."""


def load_model(text: str, sequence: int = 0) -> StepSpec:
    """Return the training step of the model with the name ``text``, or of the config.json ``text``.

    ``sequence`` is the number of tokens of a sequence. 0 means the model's own. Raises
    ``UserError`` with the known names if there is no such model.
    """
    if text.endswith(".json"):
        step = read_model(Path(text))
    elif text in MODELS:
        step = MODELS[text]
    else:
        choices = format_list([*MODELS, "a file ending in .json"])
        raise UserError(f"model {text!r} is not known: choose {choices}")
    if sequence < 0:
        raise UserError(f"sequence({sequence}) < 1")
    if sequence:
        step = replace(step, shape=replace(step.shape, sequence=sequence))
    return step
