"use strict";

/** Each phase in plain words: its name, the kind that colours it, and what happens in it, on a CPU and on a GPU if
 * these differ. */
const PHASES = {
  interpreter: ["Python", "before", "The interpreter starts."],
  bind: ["bind the port", "before", "From here on a request waits instead of being refused."],
  import_engine: ["import snapcap", "before", "The engine has a process of its own, which imports its code while the HTTP process imports the code that answers."],
  load_cpu_library: ["map the CPU library", "import", "The code was compiled against a small library of its own, so this start maps neither PyTorch's libraries nor its Python module."],
  load_libraries: ["map PyTorch's libraries", "import", "Compiled code needs PyTorch's native libraries and not its Python module, so this start leaves the module out."],
  import_torch: ["import PyTorch", "import", "A start without compiled code, or without weights prepared for it, imports PyTorch's Python module."],
  import_compiler: ["import the compiler", "import", "The jit backend restores a compile cache, which needs the compiler."],
  fetch_weights: ["find the model", "fetch", "The checkpoint comes from a folder, the hub or S3; its settings and its tokenizer are read."],
  fetch_artifacts: ["find compiled code", "fetch", "Compiled code for exactly this model, machine and version is looked up, and every byte of it is verified."],
  device_init: ["open the device", "load", "The number of the CPU's threads is set.", "The GPU's context is made."],
  load_weights: ["load weights", "load", "The model's weights are mapped into memory.", "The model's weights are copied to the GPU."],
  load_artifacts: ["open compiled code", "load", "The compiled packages are opened, those of the smallest batch size first. No compiler is needed."],
  warm_encoder: ["warm the encoder", "warm", "The part that looks at pictures runs once for each batch size."],
  warm_decoder: ["warm the decoder", "warm", "The part that writes words runs once for each batch size."],
  capture_graphs: ["capture CUDA graphs", "warm", "Whole steps are recorded, to be replayed with one call each."],
  self_test: ["caption a picture", "warm", "A built-in picture is captioned from end to end, as a request would be."],
  rehearsal: ["rehearse a request", "warm", "A picture goes through the HTTP endpoint and the engine, so that the first request of a client is not slow."],
};

const spoken = (phase) => PHASES[phase]?.[0] ?? phase.replaceAll("_", " ");
