"""Names that people know from llama.cpp, ollama, LM Studio and the hub, and what they are here."""

from collections.abc import Mapping
from types import MappingProxyType

from moepack.path_hints import HUB_DOWNLOAD

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("chat", "ask", "generate", "complete", "prompt", "start", "load", "infer", "play"),
            "run",
        ),
        **dict.fromkeys(("llama-cli", "llama", "llama-run", "main", "cli"), "run"),
        **dict.fromkeys(("server", "llama-server", "host", "api"), "serve"),
        **dict.fromkeys(("show", "info", "view", "describe", "dump", "gguf-dump"), "inspect"),
        **dict.fromkeys(("repack", "compress"), "pack"),
        **dict.fromkeys(("unpack", "decompress", "unarchive", "undo"), "restore"),
        **dict.fromkeys(("check", "test", "validate", "prove", "compare"), "verify"),
        **dict.fromkeys(("benchmark", "llama-bench", "speed"), "bench"),
        **dict.fromkeys(("estimate", "predict"), "forecast"),
        **dict.fromkeys(("plan", "fit", "offload", "gguf-parser"), "place"),
        "merge": "export gguf",
        **dict.fromkeys(("find", "where"), "locate"),
        **dict.fromkeys(("count", "heat"), "hotness"),
        **dict.fromkeys(("hardware", "sysinfo", "system"), "machine"),
        **dict.fromkeys(("diagnose", "status"), "doctor"),
        "rerank": "rank",
        "link": "index",
    }
)
"""Commands of ours, by the names of others; what was typed behind them goes with them."""

_FILES = "moepack keeps no models of its own: a model is a file or a folder, which you name"
_DOWNLOAD = "moepack downloads nothing yet; the hub's client does (pip install huggingface_hub):"
_PROGRAM = "llama.cpp's own program does, with the experts of a model bigger than memory:"

ANSWERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("pull", "download", "get", "fetch", "install", "search"), (_DOWNLOAD, HUB_DOWNLOAD)
        ),
        **dict.fromkeys(("ls", "models", "dir"), (_FILES, "moepack inspect MODEL.gguf")),
        **dict.fromkeys(("rm", "remove", "delete", "prune"), (f"{_FILES}; rm removes it", "")),
        **dict.fromkeys(("cp", "copy"), (f"{_FILES}; cp copies it", "")),
        **dict.fromkeys(("mv", "move", "rename"), (f"{_FILES}; mv renames it", "")),
        **dict.fromkeys(("push", "upload"), (_FILES, "hf upload OWNER/NAME MODEL.moepack")),
        **dict.fromkeys(
            ("ps", "stop", "kill", "unload", "daemon"),
            ("nothing runs in the background: Ctrl-C ends moepack run and moepack serve", ""),
        ),
        **dict.fromkeys(
            ("quantize", "quantise", "llama-quantize"),
            (
                "moepack changes no weights; llama.cpp's llama-quantize does:",
                "llama-quantize MODEL.gguf NAME-Q4_K_M.gguf Q4_K_M",
            ),
        ),
        **dict.fromkeys(
            ("create", "make", "build"),
            ("a pack is made of a GGUF:", "moepack pack MODEL.gguf -o NAME.moepack"),
        ),
        **dict.fromkeys(
            ("convert", "to-gguf", "convert-hf-to-gguf", "convert_hf_to_gguf.py"),
            (
                "llama.cpp's convert_hf_to_gguf.py makes a GGUF of safetensors; of a pack:",
                "moepack export gguf MODEL.moepack -o NAME.gguf",
            ),
        ),
        **dict.fromkeys(
            ("split", "llama-gguf-split", "gguf-split"),
            (
                "llama.cpp's program does; moepack takes the shards as they are:",
                "llama-gguf-split --split MODEL.gguf MODEL",
            ),
        ),
        **dict.fromkeys(
            ("perplexity", "llama-perplexity", "ppl"),
            (_PROGRAM, "moepack run MODEL.gguf -- llama-perplexity -m {} -f TEXT.txt"),
        ),
        **dict.fromkeys(
            ("imatrix", "llama-imatrix"),
            (_PROGRAM, "moepack run MODEL.gguf -- llama-imatrix -m {} -f TEXT.txt"),
        ),
        **dict.fromkeys(
            ("embed", "embedding", "embeddings", "llama-embedding"),
            (_PROGRAM, "moepack run MODEL.gguf -- llama-embedding -m {} -p TEXT"),
        ),
        **dict.fromkeys(("login", "signin", "auth"), ("the hub's client does:", "hf auth login")),
        **dict.fromkeys(
            ("cache", "config", "settings"),
            (
                "there are no settings but the options; what was learned of a model is shown by:",
                "moepack hotness --learned MODEL.gguf",
            ),
        ),
        **dict.fromkeys(
            ("update", "upgrade"),
            ("it is updated by what installed it: pip, uv or pipx", "moepack --version"),
        ),
        **dict.fromkeys(("version", "versions"), ("it is an option:", "moepack --version")),
        **dict.fromkeys(("unmount", "umount"), ("", "fusermount3 -u FOLDER")),
    }
)
"""What there is no command for: why, and what to type."""

OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("--ctx-size", "--ctx", "--num-ctx", "--n-ctx"), ("--context",)),
        **dict.fromkeys(("--n-predict", "--predict", "--max-tokens"), ("--tokens",)),
        **dict.fromkeys(("--ubatch-size", "--ubatch"), ("--micro-batch",)),
        **dict.fromkeys(("--sys", "--system-prompt"), ("--system",)),
        **dict.fromkeys(("--ram", "--mem", "--max-memory", "--cache-size"), ("--memory", "--ram")),
        **dict.fromkeys(("--out", "--outfile", "--dest", "--output-dir"), ("--output",)),
        **dict.fromkeys(("--overwrite", "--yes"), ("--force",)),
        **dict.fromkeys(("--alias", "--model-name"), ("--name",)),
        **dict.fromkeys(("--input", "--gguf", "--shards"), ("--source", "--model")),
        **dict.fromkeys(("--policy",), ("--policies",)),
        **dict.fromkeys(("--budget",), ("--budgets", "--memory")),
        **dict.fromkeys(("--layers", "--l"), ("--layer", "--layers")),
        **dict.fromkeys(("--experts", "--e"), ("--expert",)),
        **dict.fromkeys(("--silent",), ("--quiet",)),
        **dict.fromkeys(("--compress", "--compression"), ("--codec",)),
        **dict.fromkeys(("--gpu-memory", "--gpu"), ("--vram",)),
    }
)
"""Options of ours by other names, those that are more likely first."""

LLAMA_OPTIONS = frozenset(
    (
        *("-ngl", "--n-gpu-layers", "--gpu-layers", "-fa", "--flash-attn", "-ctk", "-ctv"),
        *("--cache-type-k", "--cache-type-v", "-b", "--batch-size", "-ot", "--override-tensor"),
        *("-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-mg", "--main-gpu", "-ts", "-sm"),
        *("--tensor-split", "--split-mode", "-dev", "--device", "-np", "--parallel", "-md"),
        *("--model-draft", "-tb", "--threads-batch", "--jinja", "--mlock", "--no-mmap", "--numa"),
        *(
            "--lora",
            "--mmproj",
            "-mm",
            "--grammar",
            "--grammar-file",
            "--json-schema",
            "--rope-scaling",
        ),
        *("--rope-freq-base", "-cnv", "-no-cnv", "-st", "--embeddings", "--reasoning-format"),
        *("-nkvo", "--no-kv-offload", "-hf", "-hff", "-hft", "-mu", "--ignore-eos", "-kvu"),
        *("--metrics", "--slots", "--webui", "--no-webui", "--host", "--port"),
    )
)
"""Options of llama.cpp's programs that are none of ours."""
