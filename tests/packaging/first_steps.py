"""What a new user does first, as a script: convert, train three steps, save, load. Prints where comera was found."""

from pathlib import Path

import torch
from torch import nn

import comera


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(200, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 200))


compressed = model()
report = comera.tensorize_(compressed, ratio=3)
optimizer = torch.optim.AdamW(comera.param_groups(compressed, lr=1e-2))
ranks = comera.RankController(compressed, late=comera.LateStage(target_size=0.8, start_step=1)).attach(optimizer)
ids = torch.randint(200, (64,))
losses = []
for _ in range(3):
    loss = nn.functional.cross_entropy(compressed(ids), ids)
    loss.backward()
    ranks.observe(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
ranks.meet_target_()
comera.save_pretrained(compressed, "saved")
loaded = comera.load_pretrained(model(), "saved")
assert torch.equal(loaded(ids), compressed(ids))
assert losses[-1] < losses[0], losses
assert comera.model_size(compressed).tensorized <= 0.8 * report.size.tensorized
print(Path(comera.__file__).parent)
