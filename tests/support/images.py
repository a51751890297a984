"""A model of texts with images, batched as Qwen-VL's: the patches of all images are one tensor, and
a sample may have several images or none.
"""

import helpers as h
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

IMAGE = 1  # the token at whose place an image comes
PATCH = 6  # numbers in a patch


class ImagesAndText(nn.Module):
    """Fails if it gets other images than its tokens name.

    Args:
        dropout: Of the texts. image_dropout: Of the patches.
    """

    def __init__(self, dropout: float = 0.0, image_dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(h.VOCABULARY, h.WIDTH)
        self.patches = nn.Linear(PATCH, h.WIDTH)
        self.image_dropout = nn.Dropout(image_dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(h.WIDTH, h.VOCABULARY)

    def forward(self, input_ids, labels, pixel_values=None, image_grid_thw=None):
        hidden = self.embedding(input_ids)
        if pixel_values is not None:
            patches = self.image_dropout(self.patches(pixel_values).tanh())
            sizes = image_grid_thw.prod(-1).tolist()
            images = torch.stack([image.mean(0) for image in patches.split(sizes)])
            places = (input_ids == IMAGE).unsqueeze(-1)
            assert int(places.sum()) == len(images)
            hidden = hidden.masked_scatter(places, images)
        logits = self.head(self.dropout(hidden.cumsum(1)))
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=h.IGNORED
        )
        return ModelOutput(loss=loss, logits=logits)


@h.seeded
def images_and_text(dropout: float = 0.0, image_dropout: float = 0.0) -> nn.Module:
    return ImagesAndText(dropout, image_dropout)


def image_samples(num_samples: int, num_images=(0, 1, 2), num_patches=(2, 3, 4, 1)) -> list[dict]:
    """Texts of different lengths. num_images, num_patches: of one sample or image after another."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for index in range(num_samples):
        images = [
            torch.randn(num_patches[(index + i) % len(num_patches)], PATCH, generator=generator)
            for i in range(num_images[index % len(num_images)])
        ]
        text = torch.randint(2, h.VOCABULARY, (3 + index % 5,), generator=generator).tolist()
        samples.append({"input_ids": [IMAGE] * len(images) + text, "images": images})
    return samples


def collate_images(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Without entries for images where no sample has any, as transformers' processors."""
    batch = h.pad_right([{"input_ids": s["input_ids"], "labels": s["input_ids"]} for s in samples])
    batch["labels"] = batch["labels"].masked_fill(batch["input_ids"] == IMAGE, h.IGNORED)
    images = [image for sample in samples for image in sample["images"]]
    if images:
        batch["pixel_values"] = torch.cat(images)
        batch["image_grid_thw"] = torch.tensor([[1, 1, len(image)] for image in images])
    return batch
