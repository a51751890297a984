"""Each launch profile is read by Accelerate's own parser and launcher, says what it is for, and
every key in it is explained.
"""

import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment
from accelerate.utils.launch import _filter_args, prepare_multi_gpu_env
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.run import config_from_args, get_args_parser

PROFILES = sorted((Path(__file__).parents[2] / "accelerate_configs").glob("*.yaml"))
FOLDER = PROFILES[0].parent
# What the launcher makes of each: (many processes by torch's launcher, FSDP, processes, machines,
# precision, on the CPU).
LAUNCHED = {
    "cpu": (False, False, 1, 1, "no", True),
    "cpu_2": (True, False, 2, 1, "no", True),
    "single_gpu": (False, False, 1, 1, "bf16", False),
    "single_gpu_fp32": (False, False, 1, 1, "no", False),
    "single_gpu_fp16": (False, False, 1, 1, "fp16", False),
    "multi_gpu": (True, False, 8, 1, "bf16", False),
    "multi_gpu_fp32": (True, False, 8, 1, "no", False),
    "multi_node": (True, False, 16, 2, "bf16", False),
    "elastic": (True, False, 8, 1, "bf16", False),
    "fsdp1": (False, True, 8, 1, "bf16", False),
    "fsdp2": (False, True, 8, 1, "bf16", False),
    "fsdp2_offload": (False, True, 8, 1, "bf16", False),
}


def launched(profile, *flags):
    """The launcher's arguments, checked and completed by itself."""
    parser = launch_command_parser()
    args, _, _ = _validate_launch_command(
        parser.parse_args(["--config_file", str(profile), *flags, "script.py"])
    )
    return args


def unknown_fsdp_keys(profile):
    """Accelerate hands on whatever stands in `fsdp_config`; what is no flag of the launcher has no
    effect.
    """
    flags = vars(launch_command_parser().parse_args(["script.py"]))
    return [
        key
        for key in (yaml.safe_load(profile.read_text()).get("fsdp_config") or {})
        if key not in flags
    ]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.stem)
def test_accelerate_launches_it_as_meant(profile):
    """A key that Accelerate does not know raises there."""
    assert len(LAUNCHED) == len(PROFILES)
    config = load_config_from_file(str(profile))
    args = launched(profile)
    assert not unknown_fsdp_keys(profile)
    assert not (args.use_deepspeed or args.use_megatron_lm or args.tpu)
    found = (
        args.multi_gpu,
        args.use_fsdp,
        args.num_processes,
        args.num_machines,
        args.mixed_precision,
        bool(args.use_cpu),
    )
    assert found == LAUNCHED[profile.stem]
    assert config.num_processes == args.num_processes
    assert config.mixed_precision == args.mixed_precision


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.stem)
def test_every_key_is_explained(profile):
    """In its own line, and the file says in its first one what it is for."""
    first, *lines = profile.read_text().splitlines()
    assert first.startswith("# ")
    keys = [line for line in lines if not line.startswith("#") and line.strip() != "fsdp_config:"]
    assert len(keys) >= 5
    assert [line for line in keys if len(line.partition(" # ")[2].strip()) < 5] == []


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "fsdp2_offload"])
def test_what_fsdp_shards_with(name):
    with patch_environment(**prepare_multi_gpu_env(launched(FOLDER / f"{name}.yaml"))):
        plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == int(name[4])
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap is None
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    assert not plugin.activation_checkpointing
    assert (
        not plugin.cpu_ram_efficient_loading and not plugin.sync_module_states
    )  # all processes need true weights for the trial
    offload = plugin.cpu_offload
    assert type(offload).__name__ == {"fsdp1": "CPUOffload", "fsdp2": "OffloadPolicy"}.get(
        name, "CPUOffloadPolicy"
    )
    if name == "fsdp1":
        assert plugin.sharding_strategy == ShardingStrategy.FULL_SHARD
        assert plugin.use_orig_params
        assert plugin.backward_prefetch == BackwardPrefetch.BACKWARD_PRE
        assert not plugin.forward_prefetch
        assert not offload.offload_params
    else:
        assert plugin.reshard_after_forward is True


def test_the_elastic_profile_takes_the_range_of_machines_from_the_environment(monkeypatch):
    """As its first lines say; without them, one machine. The backend is a flag: Accelerate does
    not read it from a profile.
    """
    profile = FOLDER / "elastic.yaml"
    variables, flags = environment_and_flags(profile.read_text())
    assert variables.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    for machines in ("1:1", "1:8"):
        args = launched(profile, *flags)
        prepare_multi_gpu_env(args)
        torchrun = _filter_args(args, get_args_parser(), ["--training_script", "script.py"])
        assert (torchrun.nnodes, torchrun.nproc_per_node) == (machines, "8")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    config, _, _ = config_from_args(torchrun)
    assert (config.min_nodes, config.max_nodes, config.max_restarts) == (1, 8, 1000)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "/shared/run.rendezvous")
    assert launched(profile).rdzv_backend == "static"
    assert config.rdzv_configs["store_type"] == "file"
    assert config.rdzv_configs["last_call_timeout"] == "5"


def environment_and_flags(text):
    """What a profile's first lines export, and the flags of their command."""
    comments = [line[1:] for line in text.splitlines() if line.startswith("#")]
    words = shlex.split(" ".join(comments).replace("\\", ""), comments=False)
    variables = dict(word.split("=") for word in words if word.startswith(("PET_", "TORCH_")))
    flags = words[words.index("--rdzv_backend") : words.index("scripts/finetune.py")]
    return variables, flags


def test_a_misspelt_key_is_found(tmp_path):
    """The control: Accelerate launches it; only the comparison with its flags sees it."""
    text = (FOLDER / "fsdp2.yaml").read_text()
    (tmp_path / "inner.yaml").write_text(
        text.replace("fsdp_offload_params", "fsdp_offload_parameters")
    )
    assert launched(tmp_path / "inner.yaml").use_fsdp
    assert unknown_fsdp_keys(tmp_path / "inner.yaml") == ["fsdp_offload_parameters"]
