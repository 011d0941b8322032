"""The page in docs/, made again with the present code: python -m tests.slow.plays

Its model comes from

    python train.py configs/fast.yaml --sources=data/plays --block_size=128 --max_iters=1000 \\
        --warmup_ratio=0.05 --cooldown_ratio=0.9 --learning_rate=0.02 \\
        --muon_learning_rate=0.02 --muon_momentum=0.9 --eval_interval=250 --out_dir=out/plays
    python sample.py --ckpt out/plays --html docs/plays.html
"""

import base64
import json
import re

import numpy as np
import torch

from configs.schema import ModelConfig
from model.gpt import GPT
from model.parameters import set_tensors
from page.export import expected_logits, fill_template
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "plays.html"


def refreshed(page: str) -> str:
    """Return a page with its data and weights, the present code and logits."""
    parts = dict(re.findall(r'<script type="[^"]*" id="(\w+)">(.*?)</script>', page, re.DOTALL))
    data, weights = json.loads(parts["data"]), base64.b64decode(parts["weights"])
    numbers = torch.from_numpy(np.frombuffer(weights, "<f4").copy())
    arrays = numbers.split([int(np.prod(shape)) for _, shape in data["shapes"]])
    model = GPT(ModelConfig(**data["config"]), len(data["vocabulary"]))
    named = zip(data["shapes"], arrays, strict=True)
    set_tensors(model, {name: array.view(shape) for (name, shape), array in named})
    return fill_template(data | {"check": expected_logits(model)}, weights).decode()


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
