"""The part that runs inside vLLM's workers: takes new weights, and gives log-probs as the contract of engines asks for.

vLLM mixes the class below into its workers (`--worker-extension-cls`); its methods are called over `/collective_rpc`.
The file is copied into vLLM's environment as it is, so it imports nothing of Practicum. All patches to vLLM are here:

- MoE weights on the CPU, seen in vLLM 0.32. There experts are packed for the kernel once, when their layer is first set
  up; `reload_weights` puts new ones in unpacked, and the kernel reads them as if they were packed. So the layer is made
  to set itself up again. On GPUs nothing is packed at that place.
- Tied embeddings on the CPU, seen in vLLM 0.32, also for dense models. The head keeps a packed copy of the weights it
  shares with the embedding; no weights of its own arrive with an update, so it keeps the old ones. It is packed again.
- Log-probs, for the V1 model runner. vLLM gives them before temperature or after top-k and top-p; we need them between.
  Where the sampler is another one, it is left alone: the client finds out what it gets and refuses what would be wrong.
"""

from __future__ import annotations

from typing import Any


class PracticumWorker:
    model_runner: Any  # of the vLLM worker this is mixed into

    def practicum_prepare(self) -> str:
        """Prepare the worker, once before the first request; return what log-probs are."""
        return "between temperature and top-k" if _patch_sampler(self.model_runner) else "as vLLM has them"

    def practicum_load(self, folder: str) -> str:
        """Take the weights in a folder of safetensors."""
        model = self.model_runner.get_model()
        num_layers = _unpack_experts(model)
        self.model_runner.reload_weights(weights_path=folder)
        num_heads = _pack_heads(model)
        return f"{num_layers} layers of experts and {num_heads} heads set up again"


def _unpack_experts(model: Any) -> int:
    """Have the experts' layers pack their next weights, as they did with the first; how many there are."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found,unused-ignore]

    if not current_platform.is_cpu():
        return 0
    num_layers = 0
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
            num_layers += 1
    return num_layers


def _pack_heads(model: Any) -> int:
    """Have layers that keep both their weights and a packed copy make that again; how many there are."""
    num_heads = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        # Others let go of their weights when they were packed, and pack new ones as they come.
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)
            num_heads += 1
    return num_heads


def _patch_sampler(runner: Any) -> bool:
    """Patch the sampler if it is of the known kind, in the mode `processed_logprobs`; return whether it is."""
    sampler = getattr(runner, "sampler", None)
    filters = getattr(sampler, "topk_topp_sampler", None)
    if filters is None or getattr(sampler, "logprobs_mode", None) != "processed_logprobs":
        return False
    original = filters.forward

    def forward(logits: Any, generators: Any, k: Any, p: Any) -> Any:
        if k is None and p is None:
            return original(logits, generators, k, p)
        import torch

        unfiltered = logits.log_softmax(dim=-1, dtype=torch.float32)  # before `original`, which may work in place
        return original(logits, generators, k, p)[0], unfiltered

    filters.forward = forward
    return True
