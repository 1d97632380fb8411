// A streamed chat completion, chunk by chunk.
"use strict";

// Yields the objects of the stream; throws an Error with the server's sentence if it refuses or fails.
export async function* chunks(body, key, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error(await failure(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the server ended in the middle of the answer");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // comments, with which the server shows that it is there
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

async function failure(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered with status ${answer.status}`;
  }
}
