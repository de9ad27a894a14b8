"""The number of threads that a command computes with, for as long as it runs."""

_before: list[int] = []  # what PyTorch was set to before each `set_threads` of this command


def set_threads(threads: int | None) -> None:
    """Give PyTorch this many CPU threads until the command ends; None leaves its choice."""
    if threads is not None:
        import torch

        _before.append(torch.get_num_threads())
        torch.set_num_threads(threads)


def put_threads_back() -> None:
    """Give PyTorch the threads that it had before the command: who calls `main` goes on with their own number."""
    if _before:
        import torch

        torch.set_num_threads(_before[0])
        _before.clear()
