"""Settings of a job, in messages to a script: by the calls that set them there."""

import re

_CALLS = {
    r"train\.batch_size above \d+": "a larger dataset.init(batch_size=)",  # the job does not know it
    r"train\.(batch_size|thread_num)": r"dataset.init(\1=)",
    r"train\.weight_decay": "weight_decay of the optimizer",
    r"train\.(\w+)": r"minimize(\1=)",
    r"life\.([\w.]+\w)": r"\1 in minimize(life=)",
    r"optimizer\.sparse\.(\w+)": r"\1 of the optimizer",
    r"optimizer\.dense\.(\w+)": r"\1 of the dense optimizer",
    r"strategy\.async\b": "strategy.async_",
    r"cluster\.(\w+)": r"fleet.init(\1=)",
}


def as_calls(text: str) -> str:
    """Returns a message with the calls of a script in place of a job's keys."""
    for key, call in _CALLS.items():
        text = re.sub(rf"(?<![\w.]){key}", call, text)
    return text
