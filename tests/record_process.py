"""One of two processes that save and restore; ``test_training_record_processes.py``.

Usage: record_process.py ADDRESS INDEX FOLDER. Prints its name when all is as it was.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_adamw as jfa


def main() -> None:
    address, index, folder = sys.argv[1:]
    jax.distributed.initialize(address, 2, int(index))
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    rows, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    matrix = np.arange(64, dtype=np.float32).reshape(8, 8)

    def make(value, sharding):
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    tree = {
        "rows": make(matrix, rows),
        "whole": make(matrix[3], whole),
        "host": matrix * 2,
        "empty": make(matrix[:0], whole),
        "step": make(np.int32(5), whole),
        "key": jax.jit(lambda: jax.random.key(3), out_shardings=whole)(),
        "epoch": 7,
    }
    own = np.full(8, float(index), np.float32)  # of each process another
    parted = jax.make_array_from_callback(own.shape, whole, own.__getitem__)
    # A number for an array, and an array for a number.
    like = tree | {"step": 0, "epoch": make(np.int32(0), whole)}
    with jfa.TrainingRecord(f"{folder}/run") as record:
        try:
            record.save(1, tree | {"whole": parted})
        except ValueError as error:
            assert "['whole'] should be the same on all" in str(error)
        else:
            raise AssertionError("saved replicas that differ")
        assert record.save(1, tree)
        restored = record.restore(like).tree
        told = record._read(1, about=ocp.args.JsonRestore())["checksums"]
        assert told.keys() == {f"[{name!r}]" for name in tree if name != "empty"}
    assert type(restored["step"]) is int and restored["step"] == 5
    assert int(restored["epoch"]) == 7
    np.testing.assert_array_equal(restored["host"], matrix * 2)
    np.testing.assert_array_equal(restored["whole"], matrix[3])
    key = np.asarray(jax.random.key_data(restored["key"]))
    np.testing.assert_array_equal(key, jax.random.key_data(jax.random.key(3)))
    for shard in restored["rows"].addressable_shards:
        np.testing.assert_array_equal(shard.data, matrix[shard.index])
    for name in ("rows", "whole", "empty", "key", "epoch"):
        assert restored[name].sharding == like[name].sharding, name
    assert restored["empty"].dtype == jnp.float32 and restored["empty"].shape == (0, 8)
    print("restored by", index)


if __name__ == "__main__":
    main()
