"""Instruction following by the public IFBench checkers, which have to be installed."""

from __future__ import annotations

from slime.exceptions import ConfigError


def compute_ifbench_reward(response: str, label: object, metadata: dict | None = None) -> float:
    """1.0 when every instruction of the prompt is followed, else 0.0. ConfigError without the
    package.
    """
    try:
        from ifbench import evaluation_lib
    except ImportError as error:
        raise ConfigError(
            "reward type ifbench needs the IFBench checkers (module `ifbench.evaluation_lib` of "
            "allenai/IFBench) on "
            "PYTHONPATH. Install them, or use --custom-rm-path."
        ) from error
    metadata = metadata or {}
    example = evaluation_lib.InputExample(
        key=metadata.get("record_id", 0),
        instruction_id_list=metadata["instruction_id_list"],
        prompt=metadata.get("prompt_text", ""),
        kwargs=metadata["kwargs"],
    )
    result = evaluation_lib.test_instruction_following_strict(example, {example.prompt: response})
    return float(result.follow_all_instructions)
