"""Fine-tune a model with real weights in two stages, and eager PyTorch beside it: the weights stay the same.

    pip install 'graphcomp[pretrained]'
    python examples/06_pretrained.py

The model is Silero VAD (MIT licence), which says whether sound is speech. Its weights come inside the PyPI package
`silero-vad`; nothing is downloaded here. It learns to call a harmonic tone speech, and noise and silence not.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.testing import VirtualStep

RATE, CHUNK, CONTEXT = 16_000, 512, 64
"""Samples in a second, in a chunk of sound, and of the chunk before that stand in front of it."""


class SpeechDetector(nn.Module):
    """Silero VAD at 16 kHz: spectrum, four convolutions, one recurrent cell, one number for each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def features(self, chunks: Tensor) -> Tensor:
        """(number, CONTEXT + CHUNK) -> (number, 128)"""
        spectrum = self.stft_conv(F.pad(chunks[:, None], (0, CONTEXT), mode="reflect"))
        real, imaginary = spectrum.chunk(2, dim=1)
        x = (real.square() + imaginary.square()).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = torch.relu(layer(x))
        return x.squeeze(-1)

    def forward(self, sound: Tensor) -> Tensor:
        """(rows, chunks, CONTEXT + CHUNK) -> (rows, chunks): the logit of speech in each chunk."""
        rows, chunks = sound.shape[:2]
        features = self.features(sound.flatten(0, 1)).unflatten(0, (rows, chunks))
        state, logits = None, []
        for chunk in features.unbind(1):
            state = self.lstm_cell(chunk, state)
            logits.append(self.final_conv(torch.relu(state[0])[..., None]).flatten(1))
        return torch.cat(logits, dim=1)


def pretrained() -> SpeechDetector:
    """The model with its published weights. The package itself is not imported: it wants audio libraries."""
    from safetensors.torch import load_file

    package = importlib.util.find_spec("silero_vad")
    if package is None or package.origin is None:
        raise SystemExit("the package silero-vad is missing: pip install 'graphcomp[pretrained]'")
    model = SpeechDetector()
    model.load_state_dict(load_file(Path(package.origin).parent / "data" / "silero_vad_16k.safetensors"))
    return model.requires_grad_(True)


def in_chunks(sound: Tensor) -> Tensor:
    """(rows, samples) -> (rows, chunks, CONTEXT + CHUNK)"""
    return F.pad(sound, (CONTEXT, 0)).unfold(1, CONTEXT + CHUNK, CHUNK)


def batch(rows: int, chunks: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tones with harmonics, and noise; the label of each chunk is whether it is a tone."""
    time = torch.arange(chunks * CHUNK) / RATE
    pitch = 90 + 160 * torch.rand(rows, 1, 1, generator=generator)
    harmonics = torch.arange(1, 9)[:, None]
    tones = (torch.sin(2 * math.pi * pitch * harmonics * time) / harmonics).sum(1)
    noise = torch.randn(rows, chunks * CHUNK, generator=generator)
    is_tone = torch.arange(rows) % 2 == 0
    sound = 0.1 * torch.where(is_tone[:, None], tones, noise)
    return {"sound": in_chunks(sound), "labels": is_tone[:, None].expand(rows, chunks).float()}


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    total = F.binary_cross_entropy_with_logits(logits, batch["labels"], reduction="sum")
    return gc.TokenLoss(total, logits.numel())


def eager_step(model: nn.Module, microbatches: list[dict[str, Tensor]]) -> float:
    count = sum(batch["labels"].numel() for batch in microbatches)
    shares = [loss_fn(model(batch["sound"]), batch).total / count for batch in microbatches]
    for share in shares:
        share.backward()
    return float(torch.stack(shares).detach().sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    model = pretrained()
    silence = torch.sigmoid(model(in_chunks(torch.zeros(1, 4 * CHUNK)))).max()
    print(f"before: silence is speech with a probability of {float(silence.detach()):.3f}")

    eager = copy.deepcopy(model)
    step = VirtualStep(model, loss_fn, plan=gc.Plan(stages=2, backend="eager", quiet=True))
    generator = torch.Generator().manual_seed(0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02, momentum=0.9) for each in (model, eager)]
    largest = 0.0
    for number in range(options.steps):
        microbatches = [batch(rows, 4, generator) for rows in (4, 6, 2)]
        ran = step.run(microbatches)
        for name, parameter in model.named_parameters():
            parameter.grad = ran.gradients[name]
        expected = eager_step(eager, microbatches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = float(ran.result.loss)
        largest = max(largest, abs(loss / expected - 1))
        print(f"step {number}: loss {loss:.6f} in two stages, {expected:.6f} eager")
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        largest = max(largest, float((one - other).detach().abs().max() / other.detach().abs().max()))
    print(f"largest relative difference of losses and weights: {largest:.1e}")
    return 0 if largest < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
