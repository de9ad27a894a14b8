

@torch.no_grad()
def test_a_packed_folder_keeps_them(model_files: Callable[..., Any], tmp_path: Path) -> None:
    files, kinds = model_files(hidden_size=256, intermediate_size=512, head_dim=32), ["Q4_K", "Q5_K", "Q6_K"]
    made: dict[str, Any] = dict(files.weights)
    for i, (key, weight) in enumerate(files.weights.items()):
        if weight.ndim == 2:
            kind = kinds[i % 3]
            made[key] = pack_ggml(random_blocks(kind, *weight.shape, seed=i), kind)

    def described(key: str, weight: Tensor) -> PackedWeight:
        held = made[key]
        name = held.format.name if isinstance(held, LinearPacked) else None
        return PackedWeight(key, tuple(weight.shape), name, lambda: held)

    weights = [described(key, weight) for key, weight in files.weights.items()]
    save_packed(weights, files.config, tmp_path / "packed", recipe={})
    model = llamarium.load(tmp_path / "packed", device="cpu").model
    assert isinstance(model.model, NativeLlamaModel)
    for key, held in made.items():
        if isinstance(held, LinearPacked):
            module = model.get_submodule(key.removesuffix(".weight"))
            assert torch.equal(module.weight, held.weight) and module.format is held.format
