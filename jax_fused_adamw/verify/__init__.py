"""Tells what is proven on this machine, and what is not.

``python -m jax_fused_adamw.verify`` runs suites of checks in processes of their own and
leaves one JSON file; ``--help`` names its options.
"""


class VerifyError(Exception):
    """What stops the command and the user can put right, told in one line."""
