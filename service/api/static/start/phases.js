"use strict";

/** Each phase in plain words: its name, the kind that colours it, and what happens in it. */
const PHASES = {
  interpreter: ["Python", "before", "The interpreter starts."],
  bind: ["bind the port", "before", "From here on a request waits instead of being refused."],
  import_engine: ["import snapcap", "before", "The engine has a process of its own, which imports its code while the other one imports what answers."],
  load_libraries: ["map PyTorch's libraries", "import", "Compiled code needs PyTorch's native libraries and not its Python module, so that is left out."],
  import_torch: ["import PyTorch", "import", "A start without compiled code, or without weights that were prepared for it, imports PyTorch's Python module, the longest part of it."],
  import_compiler: ["import the compiler", "import", "For the jit backend only, which restores a cache instead of opening finished code."],
  fetch_weights: ["find the model", "fetch", "The checkpoint comes from a folder, the hub or S3; its settings and its tokenizer are read."],
  fetch_artifacts: ["find compiled code", "fetch", "Compiled code for exactly this model, machine and version is looked up, and every byte of it is verified."],
  device_init: ["open the device", "load", "The GPU's context is made, or the CPU's threads are set."],
  load_weights: ["load weights", "load", "The model's weights are mapped into memory, or copied to the GPU."],
  load_artifacts: ["open compiled code", "load", "The packages are opened without any compiler, those of one batch size while that before it is warmed."],
  warm_encoder: ["warm the encoder", "warm", "The part that looks at pictures runs once for each batch size."],
  warm_decoder: ["warm the decoder", "warm", "The part that writes words runs once for each batch size."],
  capture_graphs: ["capture CUDA graphs", "warm", "Whole steps are recorded, to be replayed with one call each."],
  self_test: ["caption a picture", "warm", "A built-in picture is captioned from end to end, as a request would be."],
  rehearsal: ["rehearse a request", "warm", "A picture goes through the HTTP endpoint and the engine, so that no client's request does anything for the first time."],
};

const spoken = (phase) => PHASES[phase]?.[0] ?? phase.replaceAll("_", " ");
