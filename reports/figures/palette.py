"""Colours by what they mean, in all figures: declared once, light and dark, told apart by the colour-blind too."""

# each on its background, found by search: at least 3:1 there, and far from the others for people without red or green
HUES = {
    "blue": ("#1f6fd6", "#4a8dff"),
    "orange": ("#d67400", "#f46a0e"),
    "green": ("#369564", "#8be9a1"),
    "purple": ("#7b1fa2", "#c070c1"),
    "gold": ("#817029", "#f9db69"),
    "teal": ("#129bb0", "#84ebf5"),
    "red": ("#8c1028", "#f45454"),
    "grey": ("#70757a", "#a9969e"),
}

STEP = {
    "compute": "blue",
    "hidden": "teal",
    "exposed": "orange",
    "copy": "gold",
    "idle": "grey",
    "update": "purple",
    "residual": "grey",
}
PIPELINE = {
    "F": "blue",
    "B": "green",
    "I": "teal",
    "W": "purple",
    "schedule": "grey",
    "imbalance": "red",
    "p2p": "orange",
    "rest": "gold",
}
MEMORY = {
    "parameters": "blue",
    "gradients": "gold",
    "optimizer": "green",
    "activations": "purple",
    "buffers": "teal",
}
# those that do the same have the same, and are drawn with other dashes
OPERATIONS = {
    "all_reduce": "blue",
    "all_gather": "orange",
    "reduce_scatter": "green",
    "all_to_all": "purple",
    "broadcast": "red",
    "sendrecv": "teal",
    **dict.fromkeys(("all_reduce_two_step", "reduce"), "blue"),
    **dict.fromkeys(("all_gather_v", "gather"), "orange"),
    "scatter": "green",
    "all_to_all_v": "purple",
    **dict.fromkeys(("copy", "to_device", "from_device", "barrier"), "grey"),
    **dict.fromkeys(("pingpong", "unidirectional", "bidirectional", "matrix", "pairwise"), "teal"),
}


def css_of(hue: str) -> str:
    return f"var(--{hue})"


def style_sheet() -> str:
    """Return the hues as CSS variables, on paper those of the light page."""
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in HUES.items()) for i in (0, 1))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
