"""A byte-level GPT trained with ``fused_adamw`` and again with ``optax.adamw``.

``python -m jax_fused_adamw.demo`` runs it, ``--help`` names its options. It needs
``pip install ".[demo]"``.
"""


class DemoError(Exception):
    """What stops the demo and the user can put right, told in one line."""
