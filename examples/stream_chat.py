"""Chat with a running server through the official openai client, and print each piece of text as it arrives.

Start the server first (`make serve` or `octavo serve`), then: python examples/stream_chat.py [URL] [MODEL]
"""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000", model: str = "smollm2") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is a paged KV cache?"}],
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            if chunk.usage:
                print(
                    f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} completion tokens]"
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
