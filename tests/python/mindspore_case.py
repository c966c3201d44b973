"""The same numbers as PyTorch's and as MindSpore's tensors."""

import numpy as np

T, H, I, E, K, S = 26, 48, 40, 8, 3, 1


def arrays(transposed, seed=3):
    """float32 that bfloat16 holds exactly, so that every dtype starts from the same values."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) & 0xffff0000).view(np.float32)

    def weight(count, rows, columns):
        return normal(count, columns, rows) if transposed else normal(count, rows, columns)

    ids = rng.integers(0, E, (T, K)).astype(np.int32)
    ids[3, 1] = -1
    return dict(x=normal(T, H), ids=ids, weights=rng.random((T, K), dtype=np.float32), up=weight(E, H, 2 * I),
                down=weight(E, I, H), shared_up=weight(S, H, 2 * I), shared_down=weight(S, I, H), dy=normal(T, H))
