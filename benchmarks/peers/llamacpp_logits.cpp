// llama.cpp's logits: llamacpp_logits FILE.gguf < token ids (int32) > float32 [tokens][vocabulary]
// Rows are computed in batches of 16, as in decoding many sequences, with one thread.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "llama.h"

int main(int argc, char** argv) {
    if (argc != 2) return std::fprintf(stderr, "usage: llamacpp_logits FILE.gguf < ids > logits\n"), 2;
    std::vector<llama_token> ids;
    for (llama_token id; std::fread(&id, sizeof id, 1, stdin) == 1;) ids.push_back(id);
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return std::fprintf(stderr, "%s cannot be loaded\n", argv[1]), 1;
    constexpr int32_t kBatch = 16;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(ids.size()) + kBatch;
    params.n_batch = params.n_ubatch = kBatch;
    params.n_threads = params.n_threads_batch = 1;
    llama_context* context = llama_init_from_model(model, params);
    if (!context) return std::fprintf(stderr, "no context for %zu tokens\n", ids.size()), 1;
    const size_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(kBatch, 0, 1);
    for (size_t first = 0; first < ids.size(); first += kBatch) {
        batch.n_tokens = 0;
        for (size_t i = first; i < ids.size() && i < first + kBatch; ++i, ++batch.n_tokens) {
            batch.token[batch.n_tokens] = ids[i];
            batch.pos[batch.n_tokens] = static_cast<llama_pos>(i);
            batch.n_seq_id[batch.n_tokens] = 1;
            batch.seq_id[batch.n_tokens][0] = 0;
            batch.logits[batch.n_tokens] = true;
        }
        if (llama_decode(context, batch)) return std::fprintf(stderr, "token %zu cannot be decoded\n", first), 1;
        const size_t count = batch.n_tokens * vocab;
        if (std::fwrite(llama_get_logits(context), sizeof(float), count, stdout) != count)
            return std::perror("llamacpp_logits"), 1;
    }
}
