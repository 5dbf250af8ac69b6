"""Models that a plan can be asked of, by name or by file, each as a step on no mesh yet. Pure."""

from dataclasses import replace
from pathlib import Path

from parbench.bench.text import UserError, format_list, suggest_similar
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.model.shapes import SHAPES, Bias, Latent, Shape
from parbench.workloads.planner.model_files import Mixture, Model, read_model, step_of

_LLAMA_405B = Shape("llama", 126, 16384, 128, 8, 53248, 8192, 128256)
_DEEPSEEK = Latent(
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
_OF_GPT_OSS: tuple[Bias, ...] = ("q", "k", "v", "out", "router", "experts")
MODELS = {
    step.name: step
    for step in (
        *(step_of(name, shape) for name, shape in SHAPES.items()),
        # recipe, layers, hidden, heads, kv_heads, ffn, sequence, vocabulary
        # arXiv 2407.21783, table 3: trained on 8192 tokens, then on more
        step_of("llama3-405b", _LLAMA_405B),
        step_of("llama3.1-405b", replace(_LLAMA_405B, sequence=131072)),
        # arXiv 2104.04473, table 1 (7.5 B and 529.6 B); 2005.14165, table 2.1
        step_of("gpt-7.5b", Shape("gpt", 36, 4096, 32, 32, 16384, 2048, 51200)),
        step_of("gpt-175b", Shape("gpt", 96, 12288, 96, 96, 49152, 2048, 51200)),
        step_of("gpt-530b", Shape("gpt", 105, 20480, 128, 128, 81920, 2048, 51200)),
        # arXiv 2401.04088, table 1
        step_of(
            "mixtral-8x7b",
            Shape("llama", 32, 4096, 32, 8, 14336, 8192, 32000),
            Mixture(experts=8, top_k=2, expert_ffn=14336),
        ),
        # arXiv 2505.09388, tables 1 and 2; sizes are those of config.json; trained on 4096 tokens, then on 32768
        step_of(
            "qwen3-32b",
            Shape("llama", 64, 5120, 64, 8, 25600, 4096, 151936, head_dim=128, qk_norm=True),
        ),
        step_of(
            "qwen3-235b-a22b",
            Shape("llama", 94, 4096, 64, 4, 12288, 4096, 151936, head_dim=128, qk_norm=True),
            Mixture(experts=128, top_k=8, expert_ffn=1536),
        ),
        # arXiv 2412.19437, section 4.2: trained on 4096 tokens, then on more; without the module of its second token
        step_of(
            "deepseek-v3",
            Shape(
                "llama",
                61,
                7168,
                128,
                128,
                18432,
                4096,
                129280,
                biases=("router",),
                latent=_DEEPSEEK,
            ),
            Mixture(experts=256, top_k=8, expert_ffn=2048, shared=1, dense_layers=3),
        ),
        # arXiv 2508.10925, section 2; every other layer attends to 128 tokens there, to all of them here
        step_of(
            "gpt-oss-120b",
            Shape(
                "llama",
                36,
                2880,
                64,
                8,
                2880,
                4096,
                201088,
                head_dim=64,
                biases=_OF_GPT_OSS,
                sinks=True,
            ),
            Mixture(experts=128, top_k=4, expert_ffn=2880),
        ),
    )
}


def find_model(text: str, sequence: int = 0) -> Model:
    """Return the named model, or what a file declares, of ``sequence`` tokens if not 0; ``UserError`` names all."""
    if text.endswith((".toml", ".json")):
        model = read_model(Path(text))
    elif text in MODELS:
        model = Model(MODELS[text])
    else:
        files = f", nor a file ending in .toml or .json{suggest_similar(text, MODELS)}"
        raise UserError(f"model {text!r} is not {format_list(MODELS)}{files}")
    if sequence < 0:
        raise UserError(f"sequence({sequence}) < 1")
    step, notes = model
    if sequence:
        step = replace(step, shape=replace(step.shape, sequence=sequence))
    elif text.endswith(".json"):
        notes += (
            f"{text}: without --sequence, sequences are of all {step.shape.sequence} tokens that it allows",
        )
    return Model(step, notes)


def model_of(text: str, sequence: int = 0) -> StepSpec:
    return find_model(text, sequence).step
