"""A timm network under guard: fit, calibrate, judge, save, load, and read what was found.

The weights and the images are random, so that nothing is downloaded. With a network and images of yours,
pass `pretrained=True` and loaders.

    pip install timm
    python examples/timm_network.py
"""

import tempfile
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import gramwatch

CLASSES = 4


def network() -> nn.Module:
    """A small ResNet whose predictions are spread over all classes, as those of a trained one are."""
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", pretrained=False, num_classes=CLASSES).eval()
    with torch.no_grad():
        logits = model(images(256, 9))
        model.fc.weight /= logits.std(0).unsqueeze(1)
        model.fc.bias -= model(images(256, 9)).mean(0)
    return model


def images(count: int, seed: int) -> Tensor:
    """Smooth random images."""
    noise = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(noise, size=32, mode="bilinear")


def main() -> None:
    """Fit a guard, show what it finds, save and load it."""
    model = network()
    guard = gramwatch.Guard(model, taps="ends")  # the last tensor of each size: quicker than "all"
    guard.fit(images(512, 0).split(64))
    guard.calibrate(images(200, 1).split(64))
    print(guard)

    usual, noise = images(4, 2), torch.rand(4, 3, 32, 32)
    detection = guard(torch.cat([usual, noise]))
    print(detection)  # a line for each image
    print("flagged:", detection.is_ood.tolist())
    for name, p_value in detection.parts.items():  # which member raised the alarm
        print(f"{name:>18}: {[round(p, 3) for p in p_value.tolist()]}")
    last = detection[len(detection) - 1]  # one image by itself
    print("where the last image deviates most:", last.taps[int(last.deviations.argmax())])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guard.safetensors"
        guard.metadata["network"] = "resnet10t"
        guard.save(path)
        again = gramwatch.load(path, model)
        same = torch.equal(again(torch.cat([usual, noise])).p_value, detection.p_value)
        print(f"loaded, for {again.metadata['network']}: the same verdicts: {same}")


if __name__ == "__main__":
    main()
