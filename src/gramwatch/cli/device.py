"""Where a command computes."""


def chosen_device(given: str | None) -> str:
    """The device that was named, or a GPU if there is one."""
    import torch

    return given or ("cuda" if torch.cuda.is_available() else "cpu")
