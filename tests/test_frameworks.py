"""Plain `python train.py` works on `tpu` for the libraries that choose a device themselves.

They need the extra `models`, which `test` has.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from regression import PYTHONPATH
from script import run_script

pytestmark = pytest.mark.timeout(600)


def needs(*libraries: str) -> pytest.MarkDecorator:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (the extra `models`)")


def printed(code: str, **environment: str) -> list[str]:
    """The lines that a script prints, which runs no op on the CPU."""
    ended = run_script(code, seconds=500, TORCHTPU_FALLBACK="error", PYTHONPATH=PYTHONPATH, **environment)
    assert ended.status == 0, ended.err
    assert "torchtpu does not know" not in ended.err, ended.err
    return ended.out.splitlines()


def torchrun(code: str, folder: Path, *arguments: str) -> str:
    """What two ranks of a script print."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), *arguments], cwd=folder, capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


ACCELERATE = """
    import sys
    from accelerate import Accelerator
    from regression import prepared, step

    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    plugin = None
    if "fsdp" in options:
        from accelerate import FullyShardedDataParallelPlugin
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(options["fsdp"]), auto_wrap_policy="no_wrap")
    accelerator = Accelerator(mixed_precision=options.get("precision", "no"), fsdp_plugin=plugin)
    model, optimizer, data = prepared(accelerator)
    losses = []
    for _ in range(4):
        for inputs, targets in data:
            loss = step(accelerator, model, optimizer, inputs, targets)
            losses.append(accelerator.gather(loss.reshape(1)).mean().item())
    assert losses[-1] < 0.9 * losses[0], losses
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(accelerator.device.type, inputs.device.type, accelerator.num_processes, f"{losses[-1]:.3f}", flush=True)
    accelerator.end_training()
"""


@needs("accelerate")
def test_an_accelerator_is_the_tpu_unless_the_cpu_is_asked_for() -> None:
    (found,) = printed(ACCELERATE)
    (expected,) = printed(ACCELERATE, ACCELERATE_USE_CPU="true")
    assert found.split()[:3] == ["tpu", "tpu", "1"]
    assert expected.split()[:3] == ["cpu", "cpu", "1"]
    assert found.split()[3] == expected.split()[3]


@needs("accelerate")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_accelerator_trains_in_mixed_precision(precision: str) -> None:
    code = ACCELERATE.replace("sys.argv[1::2], sys.argv[2::2]", f"['precision'], [{precision!r}]")
    assert printed(code)[0].startswith("tpu tpu 1")


@needs("accelerate")
@pytest.mark.parametrize("options", [(), ("fsdp", "2")], ids=["ddp", "fsdp2"])
def test_accelerators_under_torchrun_are_ranks_of_tpu(options: tuple[str, ...], tmp_path: Path) -> None:
    assert "tpu tpu 2" in torchrun(ACCELERATE, tmp_path, *options)


@needs("accelerate")
def test_accelerate_saves_and_loads_the_states_of_tpu_generators() -> None:
    code = """
        import tempfile
        from accelerate import Accelerator
        import torch

        accelerator = Accelerator()
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            drawn = torch.rand(3, device=accelerator.device).tolist()
            accelerator.load_state(folder)
            print(torch.rand(3, device=accelerator.device).tolist() == drawn)
    """
    assert printed(code) == ["True"]


@needs("accelerate")
def test_a_device_map_fills_the_tpus_and_then_the_cpu() -> None:
    code = """
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import get_balanced_memory, get_max_memory
        import torch

        free = get_max_memory()
        print(list(free), all(size > 0 for size in free.values()))
        print(get_max_memory({"cpu": "1GB", 1: "1KB", 0: 2048}))
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
        x = torch.randn(4, 16)
        expected = model(x)
        placed = infer_auto_device_map(model, {0: 2600, 1: 2600, "cpu": "1GB"})
        print(sorted(set(map(str, placed.values()))))
        model = dispatch_model(model, placed)
        torch.testing.assert_close(model(x.to("tpu:0")).cpu(), expected)
        balanced = get_balanced_memory(torch.nn.Linear(4, 4))
        print(list(balanced))
    """
    assert printed(code, TORCHTPU_NUM_DEVICES="2") == [
        "[0, 1, 'cpu'] True",
        "{0: 2048, 1: 1000, 'cpu': 1000000000}",
        "['0', '1', 'cpu']",
        "[0, 1, 'cpu']",
    ]


@needs("accelerate")
def test_the_accelerate_command_configures_and_launches_on_tpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(ACCELERATE))
    command = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.accelerate_cli"]

    def output(*arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
            env={
                **os.environ, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, **environment,
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "tpu tpu 2" in output("launch", "train.py", TORCHTPU_NUM_DEVICES="2")
    output("config", "default")
    assert "tpu tpu 1" in output("launch", "train.py")


@needs("accelerate")
def test_each_process_that_accelerate_launches_is_a_rank_where_there_are_several_devices() -> None:
    code = """
        from accelerate.commands import launch

        parser = launch.launch_command_parser()
        for arguments in ([], ["--num_processes=2"], ["--multi_gpu"], ["--num_processes=1"], ["--use_fsdp"], ["--cpu"]):
            chosen, *_ = launch._validate_launch_command(parser.parse_args([*arguments, "train.py"]))
            print(arguments, chosen.num_processes, chosen.multi_gpu)
    """
    several = printed(code, TORCHTPU_NUM_DEVICES="2", HF_HOME="/nowhere")
    assert several[:3] == ["[] 2 True", "['--num_processes=2'] 2 True", "['--multi_gpu'] 2 True"]
    assert several[3:5] == ["['--num_processes=1'] 1 False", "['--use_fsdp'] 2 True"]
    assert several[5].endswith("False")
    one = printed(code, TORCHTPU_NUM_DEVICES="1", HF_HOME="/nowhere")
    assert one[:3] == ["[] 1 False", "['--num_processes=2'] 2 False", "['--multi_gpu'] 1 True"]


@needs("accelerate")
def test_tests_that_ask_accelerate_for_the_device_run_on_tpu() -> None:
    code = """
        from accelerate.test_utils import DEFAULT_LAUNCH_COMMAND, device_count, memory_allocated_func, torch_device
        from accelerate.test_utils.testing import get_backend, require_cpu, require_non_cpu
        import torch

        held = torch.ones(1000, device=torch_device)
        torch.tpu.synchronize()
        print(torch_device, device_count, memory_allocated_func() >= 4000, get_backend()[:2])
        print(DEFAULT_LAUNCH_COMMAND[2])
        for require in (require_cpu, require_non_cpu):
            print(getattr(require(lambda: None), "__unittest_skip__", False))
    """
    expected = ["tpu 2 True ('tpu', 2)", "--num_processes=2", "True", "False"]
    assert printed(code, TORCHTPU_NUM_DEVICES="2") == expected


LIGHTNING = """
    import sys
    {imports}
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    losses, devices = [], []

    class Regression(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

        def step(self, batch, index):
            return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def training_step(self, batch, index):
            loss = self.step(batch, index)
            losses.append(loss.detach())
            devices.append(batch[0].device)
            return loss

        validation_step = step

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16)
    trainer = Trainer(max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, **eval(sys.argv[1] if len(sys.argv) > 1 else "{{}}"){options})
    trainer.fit(Regression(), data, data)
    losses = [float(loss) for loss in losses]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), losses
    if trainer.is_global_zero:
        print(devices[-1].type, trainer.world_size, type(trainer.strategy).__name__, f"{{losses[-1]:.3f}}", flush=True)
"""


def lightning(package: str = "lightning.pytorch", options: str = "") -> str:
    imports = f"from {package} import LightningModule, Trainer"
    return LIGHTNING.format(imports=imports, options=options)


@needs("lightning")
def test_lightning_takes_the_tpu_unless_the_cpu_is_asked_for() -> None:
    (expected,) = printed(lightning(options=', accelerator="cpu"'))
    assert expected.startswith("cpu 1 SingleDeviceStrategy")
    for options in ("", ', accelerator="tpu"', ', accelerator="tpu", devices=[0]'):
        (found,) = printed(lightning(options=options))
        assert found == expected.replace("cpu", "tpu")


@needs("lightning")
def test_lightning_names_the_tpu_in_its_log() -> None:
    ended = run_script(lightning())
    assert "TPU available: True, used: True" in ended.err
    assert "GPU available" not in ended.err


@needs("pytorch_lightning")
def test_the_package_pytorch_lightning_takes_the_tpu() -> None:
    assert printed(lightning("pytorch_lightning"))[0].startswith("tpu 1")


@needs("lightning")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_lightning_trains_in_lower_precision(precision: str) -> None:
    assert printed(lightning(options=f", precision={precision!r}"))[0].startswith("tpu 1")


@needs("lightning")
@pytest.mark.parametrize(
    "options",
    [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "fsdp", "precision": "bf16-mixed"}],
    ids=["ddp", "fsdp", "fsdp-bf16"],
)
def test_lightnings_strategies_work_under_torchrun(options: dict[str, str], tmp_path: Path) -> None:
    out = torchrun(lightning(), tmp_path, repr({"devices": 2, "use_distributed_sampler": False, **options}))
    assert f"tpu 2 {options['strategy'][:4].upper()}Strategy" in out


@needs("lightning")
def test_lightning_refuses_devices_that_are_not_there() -> None:
    ended = run_script(lightning(options=", devices=3"))
    assert ended.status == 1
    assert "You requested tpu devices [0, 1, 2], but this machine has [0]" in ended.err


@needs("lightning")
def test_fabric_takes_the_tpu() -> None:
    code = """
        from lightning.fabric import Fabric
        import torch

        fabric = Fabric(precision="bf16-mixed")
        fabric.launch()
        model = torch.nn.Linear(4, 2)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        loss = model(torch.ones(3, 4, device=fabric.device)).sum()
        fabric.backward(loss)
        optimizer.step()
        print(fabric.device, loss.device, model(torch.ones(3, 4, device=fabric.device)).dtype)
    """
    assert printed(code) == ["tpu:0 tpu:0 torch.float32"]


@needs("lightning")
def test_lightning_isolates_the_generators_of_tpu() -> None:
    code = """
        from lightning.pytorch.utilities.seed import isolate_rng
        import torch

        with isolate_rng():
            first = torch.rand(3, device="tpu").tolist()
        print(torch.rand(3, device="tpu").tolist() == first)
    """
    assert printed(code) == ["True"]


LLAMA = """
    import tempfile
    import transformers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, pipeline
    import torch

    transformers.utils.logging.disable_progress_bar()
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[1, 2, 3]])
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False).tolist()
"""


@needs("transformers", "accelerate")
def test_a_trainer_in_plain_python_trains_on_tpu() -> None:
    code = """
        import tempfile
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0)
        rows = [{"input_ids": ids, "labels": ids} for ids in ([(i + j) % 50 for j in range(16)] for i in range(64))]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, max_steps=6, per_device_train_batch_size=8, logging_steps=3,
                                          report_to=[], learning_rate=1e-2, save_strategy="steps", save_steps=3,
                                          disable_tqdm=True, bf16=True)
            trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows)
            trainer.train()
            again = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows)
            again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[1] < losses[0], losses
        resumed = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
        print("devices", arguments.device, next(trainer.model.parameters()).device, abs(resumed[-1] - losses[1]) < 1e-3)
    """
    assert printed(code)[-1] == "devices tpu:0 tpu:0 True"


@needs("transformers", "accelerate")
def test_models_load_generate_and_serve_pipelines_on_tpu() -> None:
    code = f"""{LLAMA}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for place in ("auto", "tpu", 0):
            loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=place)
            made = loaded.generate(prompt.to("tpu"), max_new_tokens=5, do_sample=False)
            print(loaded.device, made.tolist() == expected)
    made = loaded.generate(prompt.to("tpu"), max_new_tokens=5, do_sample=False, cache_implementation="static")
    print(made.tolist() == expected)
    extractor = pipeline("feature-extraction", model=transformers.BertModel(transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)),
        tokenizer=lambda *words, **options: transformers.BatchEncoding({{"input_ids": torch.tensor([[1, 2, 3]])}}))
    print(extractor.device, torch.tensor(extractor("w")).shape)
    """
    assert printed(code) == ["tpu:0 True"] * 3 + ["True", "tpu:0 torch.Size([1, 3, 32])"]


@needs("transformers", "accelerate")
def test_a_tensor_parallel_plan_works_under_torchrun(tmp_path: Path) -> None:
    saving = f"{LLAMA}\n    model.save_pretrained('model')\n    print(expected[0])\n"
    (tmp_path / "save.py").write_text(textwrap.dedent(saving))
    done = subprocess.run([sys.executable, "save.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    code = """
        from transformers import AutoModelForCausalLM
        import torch

        model = AutoModelForCausalLM.from_pretrained("model", tp_plan="auto")
        prompt = torch.tensor([[1, 2, 3]], device=model.device)
        made = model.generate(prompt, max_new_tokens=5, do_sample=False)
        print(torch.distributed.get_backend(), type(model.lm_head.weight).__name__, made[0].tolist(), flush=True)
        torch.distributed.destroy_process_group()
    """
    out = torchrun(code, tmp_path)
    assert out.count(f"tpu_dist DTensor {done.stdout.strip()}") == 2, out


@needs("datasets")
def test_datasets_hand_out_tensors_on_tpu() -> None:
    code = """
        import datasets
        import torch

        rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]]}).with_format("torch", device="tpu")
        print(rows[0]["x"].device, rows[:2]["x"].tolist())
    """
    assert printed(code) == ["tpu:0 [[1.0, 2.0], [3.0, 4.0]]"]


@needs("torchmetrics")
def test_torchmetrics_counts_on_tpu() -> None:
    code = """
        import torchmetrics
        import torch

        scores, labels = torch.rand(32, 5), torch.randint(5, (32,))
        metrics = torchmetrics.MetricCollection({
            "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=5),
            "f1": torchmetrics.F1Score(task="multiclass", num_classes=5, average="macro"),
            "auroc": torchmetrics.AUROC(task="multiclass", num_classes=5, thresholds=20),
        })
        expected = metrics(scores, labels)
        metrics.reset()
        made = metrics.to("tpu")(scores.to("tpu"), labels.to("tpu"))
        torch.testing.assert_close({name: value.cpu() for name, value in made.items()}, expected)
        print({value.device.type for value in made.values()})
    """
    assert printed(code) == ["{'tpu'}"]


@needs("ignite")
def test_ignite_trains_on_tpu() -> None:
    code = """
        from ignite.engine import create_supervised_trainer
        import ignite.distributed as idist
        import torch

        model = torch.nn.Linear(4, 1).to("tpu")
        data = [(torch.ones(8, 4), torch.zeros(8, 1))] * 5
        trainer = create_supervised_trainer(
            model, torch.optim.SGD(model.parameters(), 0.01), torch.nn.functional.mse_loss, device="tpu")
        state = trainer.run(data, max_epochs=2)
        print(state.iteration, next(model.parameters()).device)
    """
    assert printed(code) == ["10 tpu:0"]


@needs("tensorboard")
def test_tensorboard_takes_tensors_of_tpu() -> None:
    code = """
        import tempfile
        from torch.utils.tensorboard import SummaryWriter
        import torch

        with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
            writer.add_scalar("loss", torch.ones((), device="tpu"), 1)
            writer.add_histogram("weights", torch.randn(64, device="tpu"), 1)
            model = torch.nn.Linear(2, 2).to("tpu")
            writer.add_graph(model, torch.ones(1, 2, device="tpu"))
        print("written")
    """
    assert printed(code) == ["written"]


@needs("peft", "transformers")
def test_an_adapter_of_peft_trains_and_merges_on_tpu() -> None:
    code = f"""{LLAMA}
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model.to("tpu"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), 1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=prompt.to("tpu"), labels=prompt.to("tpu")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    merged = adapted.merge_and_unload()
    print(merged.device, losses[-1] < losses[0])
    """
    assert printed(code) == ["tpu:0 True"]


@needs("diffusers")
def test_a_pipeline_of_diffusers_draws_on_tpu() -> None:
    code = """
        from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
        import torch

        torch.manual_seed(0)
        unet = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
                           norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                           up_block_types=("AttnUpBlock2D", "UpBlock2D"))
        drawer = DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=4))
        drawer.set_progress_bar_config(disable=True)
        def draw(device):
            return torch.from_numpy(drawer.to(device)(generator=torch.Generator().manual_seed(1), num_inference_steps=2,
                                                      output_type="np").images)
        expected = draw("cpu")
        torch.testing.assert_close(draw("tpu"), expected, atol=1e-4, rtol=1e-4)
        print(drawer.device)
    """
    assert printed(code) == ["tpu:0"]
