"""Times the optimizer step on this machine: ours, optax's, a staged one, PyTorch's.

``python -m jax_fused_adamw.bench`` runs it, ``--help`` names its options; with
``--ladder`` it times the steps from a plain loop to the packed kernel, with
``--train-step`` whole train steps, with ``--sharded`` steps and training over several
devices. It needs ``pip install ".[bench]"``.
"""


class BenchError(Exception):
    """What stops the bench and the user can put right, told in one line."""
