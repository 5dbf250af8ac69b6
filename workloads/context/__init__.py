"""Context parallel steps: sequences over ranks, and attention that reaches all of them."""
