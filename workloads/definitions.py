"""The training steps that can be measured, declared without torch."""

DEFINITIONS = ()
