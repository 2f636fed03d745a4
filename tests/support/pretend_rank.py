"""`pretend_rank`: Megatron's parallel state answers as if this process were one rank of a layout,
without any process group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megatron.core import mpu


@contextlib.contextmanager
def pretend_rank(
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    dp_size: int = 1,
    last_stage: bool = True,
    tp_group: Any = None,
) -> Iterator[None]:
    """Inside, `mpu` gives these sizes and ranks; groups are None (the world) unless given.
    Collectives over CP are not simulated.
    """
    answers = {
        "get_context_parallel_world_size": cp_size,
        "get_context_parallel_rank": cp_rank,
        "get_context_parallel_group": None,
        "get_tensor_model_parallel_world_size": tp_size,
        "get_tensor_model_parallel_rank": tp_rank,
        "get_tensor_model_parallel_group": tp_group,
        "get_data_parallel_world_size": dp_size * cp_size,
        "get_data_parallel_group": None,
        "is_pipeline_last_stage": last_stage,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(
                mock.patch.object(mpu, name, lambda *args, answer=answer, **kwargs: answer)
            )
        yield
