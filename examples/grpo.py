"""Train a policy by its rewards: a pipeline trains it, another process samples with transformers' `generate`.

It shows weights that go from a pipeline to a process of no torch.distributed world, in the names that transformers has
and only as far as they have changed, and a loss of one's own on what comes back. Rewards are compared within the
samples of a prompt, as GRPO does (arXiv 2402.03300); samples are used once, so nothing is clipped, and there is no
reference policy.

    torchrun --nproc-per-node 2 examples/grpo.py
    torchrun --nproc-per-node 2 examples/grpo.py --steps 60

The policy is a tiny Llama with random weights, and it is rewarded for tokens below 8 of 32. It needs
`pip install "atoll[hf]"`, and prints

    step   1  reward 0.245
    step  20  reward 0.638
    ...
"""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import atoll
from atoll.runtime.changes import HeldWeights
from atoll.runtime.handover import copy_weights, give, take, weight_group

VOCABULARY, REWARDED = 32, 8
PROMPTS, GROUP, LENGTH, NEW = 4, 8, 4, 12
HOST = "127.0.0.1"


def policy() -> LlamaForCausalLM:
    """A new policy."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def sample(port: int, trainer: Connection) -> None:
    """The sampler: take weights, continue each prompt several times, and answer, until there are no more prompts."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = policy().eval()
    group = weight_group(dist.TCPStore(HOST, port, is_master=False), rank=1, size=2)
    held = HeldWeights()
    while (prompts := trainer.recv()) is not None:
        copy_weights(take(group, held=held), model)
        options = {"do_sample": True, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
        trainer.send(model.generate(prompts.repeat_interleave(GROUP, 0), **options))


def loss(logits: Tensor, batch: dict[str, dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Minus the log-probabilities of sampled tokens, weighted by the advantages of their samples, and their number."""
    given = batch["labels"]
    sampled = logits[:, LENGTH - 1 :].float().log_softmax(-1).gather(-1, given["tokens"][..., None])[..., 0]
    return -(sampled * given["advantages"][:, None]).sum(), torch.tensor(sampled.numel())


def main() -> None:
    """One rank of the trainer; the first one starts the sampler."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    mesh = atoll.MeshShape(pipeline=dist.get_world_size())
    schedule = atoll.schedule("zb-h1", ranks=mesh.pipeline, microbatches=4)
    plan = atoll.Plan(mesh=mesh, layout=atoll.Layout("NNN"), schedule=schedule, microbatch=PROMPTS * GROUP // 4)
    with torch.device("meta"):
        model = policy()
    engine = atoll.Engine(model, plan, optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3), loss=loss)
    if is_first:
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        trainer, sampler = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=sample, args=(store.port, sampler), daemon=True)
        process.start()
        group, held = weight_group(store, rank=0, size=2), HeldWeights()

    draw = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        prompts = torch.randint(1, VOCABULARY, (PROMPTS, LENGTH), generator=draw)  # 0 pads
        samples = torch.empty(PROMPTS * GROUP, LENGTH + NEW, dtype=torch.int64)
        weights = engine.stream(to=0)
        if is_first:
            trainer.send(prompts)
            give(weights, group, held=held)
            samples = trainer.recv()
        else:
            list(weights)
        dist.broadcast(samples, 0)

        rewards = (samples[:, LENGTH:] < REWARDED).float().mean(1).view(PROMPTS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        labels = {"tokens": samples[:, LENGTH:], "advantages": advantages.flatten()}
        engine.step({"input_ids": samples[:, :-1], "labels": labels})
        if is_first and (step == 1 or step % 20 == 0):
            print(f"step {step:3}  reward {rewards.mean():.3f}", flush=True)

    if is_first:
        trainer.send(None)
        process.join()
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
