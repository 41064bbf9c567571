// How long do steps of one row take in llama.cpp? llama_steps MODEL.gguf THREADS PROMPT STEPS prints JSON: seconds of the prompt, of each
// step. Built by hand against a llama.cpp that was built elsewhere; eval/bench_llama_cpp says how.
#include <llama.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Seconds of one call.
double decode(llama_context* context, std::vector<llama_token>& tokens) {
  const double begun = now();
  if (llama_decode(context, llama_batch_get_one(tokens.data(), int32_t(tokens.size())))) {
    std::fprintf(stderr, "llama_decode failed\n");
    std::exit(1);
  }
  llama_synchronize(context);
  return now() - begun;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "llama_steps MODEL.gguf THREADS PROMPT STEPS\n");
    return 2;
  }
  const int threads = std::atoi(argv[2]), length = std::atoi(argv[3]), steps = std::atoi(argv[4]);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) return 1;
  llama_context_params how = llama_context_default_params();
  how.n_ctx = uint32_t(length + steps + 1), how.n_batch = uint32_t(length), how.n_threads = how.n_threads_batch = threads;
  llama_context* context = llama_init_from_model(model, how);
  if (!context) return 1;
  const int64_t known = llama_vocab_n_tokens(llama_model_get_vocab(model));
  const auto token = [&](int64_t i) { return llama_token(i * 104729 % known); };
  std::vector<llama_token> tokens;
  for (int i = 0; i < length; ++i) tokens.push_back(token(i));
  std::printf("{\"system\": \"%s\", \"prompt\": %.6f, \"steps\": [", llama_print_system_info(), decode(context, tokens));
  for (int i = 0; i < steps; ++i) {
    std::vector<llama_token> one{token(length + i)};
    std::printf("%s%.6f", i ? ", " : "", decode(context, one));
  }
  std::printf("]}\n");
  llama_free(context);
  llama_model_free(model);
}
