import { createServer as createHttpServer } from 'node:http';
import { type AddressInfo, createServer as createTcpServer } from 'node:net';
import { inspect } from 'node:util';
import { afterEach, describe, expect, it } from 'vitest';
import { z } from 'zod';
import { type ChatServer, type Scenario, startChatServer } from '../../test/chat-server/server.ts';
import { LonghaulError, Message } from '../core/index.ts';
import type { Model, ModelRequest } from './contract.ts';
import { resolveModel } from './resolve.ts';

const closers: (() => Promise<void>)[] = [];
afterEach(async () => {
  for (const close of closers.splice(0)) await close();
});

const KEY = 'key-that-must-stay-secret-42';
const shell = {
  name: 'shell',
  description: 'Runs a command.',
  input: z.object({ command: z.string() }),
};

async function serve(turns: Scenario['turns'], more: Partial<Scenario> = {}): Promise<ChatServer> {
  const server = await startChatServer({ scenario: { ...more, turns } });
  closers.push(() => server.close());
  return server;
}

async function modelAt(
  baseUrl: string,
  more: { name?: string; idleTimeoutMs?: number; timeoutMs?: number } = {},
): Promise<Model> {
  const { name = 'scripted', ...limits } = more;
  return await resolveModel({
    ref: `openai-compatible/${name}`,
    baseUrl,
    env: { LONGHAUL_API_KEY: KEY },
    ...limits,
  });
}

function request(more: Partial<ModelRequest> = {}): ModelRequest {
  return {
    messages: [{ role: 'user', content: 'Go.' }],
    tools: [shell],
    maxOutputTokens: 100,
    sampling: { temperature: 0 },
    ...more,
  };
}

async function failure(promise: Promise<unknown>): Promise<LonghaulError> {
  const error = await promise.then(
    (value) => {
      throw new Error(`expected a failure, got ${JSON.stringify(value)}`);
    },
    (thrown: unknown) => thrown,
  );
  expect(error).toBeInstanceOf(LonghaulError);
  expect(inspect(error, { depth: 10 })).not.toContain(KEY);
  return error as LonghaulError;
}

describe('answers', () => {
  it('streams text and reports reasoning, usage and finish', async () => {
    const server = await serve([
      {
        text: 'Hello, grüße 🌍 to all of you.',
        reasoning: 'They want a greeting.',
        usage: { prompt: 12, completion: 7, cached: 4 },
      },
    ]);
    const seen: string[] = [];
    const model = await modelAt(server.baseUrl);
    const completion = await model.complete(request({ onText: (text) => seen.push(text) }));
    expect(completion).toEqual({
      message: {
        role: 'assistant',
        content: 'Hello, grüße 🌍 to all of you.',
        reasoning: 'They want a greeting.',
      },
      finishReason: 'stop',
      usage: { inputTokens: 12, outputTokens: 7, cachedInputTokens: 4 },
      provenance: 'none',
    });
    expect(seen.length).toBeGreaterThan(1);
    expect(seen.join('')).toBe('Hello, grüße 🌍 to all of you.');
  });

  it('sends sampling, limits and tool schemas', async () => {
    const server = await serve([{ text: 'ok' }]);
    const model = await modelAt(server.baseUrl);
    const sampling = { temperature: 0.5, topP: 0.9, topK: 40, seed: 7 };
    await model.complete(request({ sampling }));
    expect(server.requests[0]!.body).toMatchObject({
      stream: true,
      max_tokens: 100,
      temperature: 0.5,
      top_p: 0.9,
      top_k: 40,
      seed: 7,
      tools: [
        {
          type: 'function',
          function: {
            name: 'shell',
            parameters: { type: 'object', properties: { command: { type: 'string' } } },
          },
        },
      ],
    });
  });

  it('says null where usage is unknown', async () => {
    const server = await serve([{ text: 'ok', usage: null }]);
    const completion = await (await modelAt(server.baseUrl)).complete(request());
    expect(completion.usage).toEqual({
      inputTokens: null,
      outputTokens: null,
      cachedInputTokens: null,
    });
  });

  it('puts split tool calls together, parallel ones and unknown tools included', async () => {
    const server = await serve([
      {
        text: 'Looking.',
        toolCalls: [
          { id: 'a', name: 'shell', arguments: { command: 'cat "a b".txt | head' } },
          { id: 'b', name: 'no_such_tool', arguments: { x: [1, { y: null }] } },
          { id: 'c', name: 'shell', arguments: '' },
        ],
      },
    ]);
    const completion = await (await modelAt(server.baseUrl)).complete(request());
    expect(completion.finishReason).toBe('tool_calls');
    expect(completion.message).toEqual({
      role: 'assistant',
      content: 'Looking.',
      toolCalls: [
        { callId: 'a', tool: 'shell', input: { command: 'cat "a b".txt | head' } },
        { callId: 'b', tool: 'no_such_tool', input: { x: [1, { y: null }] } },
        { callId: 'c', tool: 'shell', input: {} },
      ],
    });
  });

  it('reports tool_calls when the server says stop, and keeps length', async () => {
    const toolCalls = [{ name: 'shell', arguments: { command: 'ls' } }];
    const server = await serve([
      [
        { toolCalls, finishReason: 'stop' },
        { text: 'cut', finishReason: 'length' },
        { text: 'no', finishReason: 'content_filter' },
      ],
    ]);
    const model = await modelAt(server.baseUrl);
    expect((await model.complete(request())).finishReason).toBe('tool_calls');
    expect((await model.complete(request())).finishReason).toBe('length');
    expect((await model.complete(request())).finishReason).toBe('content_filter');
  });

  it('keeps broken arguments as text and can send them again', async () => {
    const broken = '{"command": "ls';
    const server = await serve([
      { toolCalls: [{ id: 'a', name: 'shell', arguments: broken }] },
      { text: 'done' },
    ]);
    const model = await modelAt(server.baseUrl);
    const first = await model.complete(request());
    expect(first.message).toMatchObject({ toolCalls: [{ callId: 'a', input: broken }] });
    const messages: Message[] = [
      { role: 'system', content: 'Be brief.' },
      { role: 'user', content: 'Go.' },
      first.message,
      { role: 'tool', callId: 'a', tool: 'shell', content: 'not JSON', isError: true },
    ];
    await model.complete(request({ messages }));
    const sent = server.requests[1]!.body.messages as Record<string, unknown>[];
    expect(sent.map((message) => message.role)).toEqual(['system', 'user', 'assistant', 'tool']);
    const call = (sent[2]!.tool_calls as { function: { arguments: string } }[])[0]!;
    expect(JSON.parse(call.function.arguments)).toEqual({ invalid_arguments: broken });
    expect(sent[3]).toMatchObject({ tool_call_id: 'a', content: 'not JSON' });
  });

  it("sends back what a vendor signed, after a round through the log's JSON", async () => {
    const server = await serve([
      { toolCalls: [{ id: 'a', name: 'shell', arguments: { command: 'ls' }, signature: 'c2ln' }] },
      { text: 'done' },
    ]);
    const model = await modelAt(server.baseUrl);
    const { message } = await model.complete(request());
    const stored = Message.parse(JSON.parse(JSON.stringify(message)));
    const result: Message = { role: 'tool', callId: 'a', tool: 'shell', content: 'a.txt' };
    await model.complete(request({ messages: [...request().messages, stored, result] }));
    expect(server.requests[1]!.body.messages[1]).toMatchObject({
      tool_calls: [{ id: 'a', extra_content: { google: { thought_signature: 'c2ln' } } }],
    });
  });

  it('decodes arguments that were encoded twice', async () => {
    const twice = JSON.stringify(JSON.stringify({ command: 'ls' }));
    const server = await serve([{ toolCalls: [{ name: 'shell', arguments: twice }] }]);
    const completion = await (await modelAt(server.baseUrl)).complete(request());
    expect(completion.message).toMatchObject({ toolCalls: [{ input: { command: 'ls' } }] });
  });

  it('replaces ids that are missing or were used before, the same way each time', async () => {
    const call = (id: string | null) => ({ id, name: 'shell', arguments: { command: 'ls' } });
    const server = await serve([
      { text: 'not asked for' },
      { toolCalls: [call('call_0'), call('call_0'), call('call_1'), call(null)] },
    ]);
    const model = await modelAt(server.baseUrl);
    const messages: Message[] = [
      { role: 'user', content: 'Go.' },
      {
        role: 'assistant',
        content: '',
        toolCalls: [{ callId: 'call_0', tool: 'shell', input: { command: 'ls' } }],
      },
      { role: 'tool', callId: 'call_0', tool: 'shell', content: 'a.txt' },
    ];
    const ids = async () => {
      const { message } = await model.complete(request({ messages }));
      if (message.role !== 'assistant') throw new Error('not an assistant message');
      return message.toolCalls!.map(({ callId }) => callId);
    };
    const first = await ids();
    expect(new Set([...first, 'call_0']).size).toBe(5);
    expect(first[2]).toBe('call_1');
    expect(await ids()).toEqual(first);
  });
});

describe('failures', () => {
  it('names the URL when nothing listens', async () => {
    const port = await freePort();
    const error = await failure((await modelAt(`http://127.0.0.1:${port}/v1`)).complete(request()));
    expect(error).toMatchObject({ code: 'ModelUnreachable', class: 'retryable' });
    expect(error.message).toContain(`http://127.0.0.1:${port}/v1`);
    expect(error.message).toMatch(/nothing listens/i);
  });

  it('is retryable when the host is not known', async () => {
    const error = await failure(
      (await modelAt('http://no-such-host.invalid/v1')).complete(request()),
    );
    expect(error.code).toBe('ModelUnreachable');
    expect(error.message).toContain('http://no-such-host.invalid/v1');
  });

  it('names the variable when the key is wrong', async () => {
    const server = await serve([{ text: 'ok' }], { apiKey: 'another' });
    const error = await failure((await modelAt(server.baseUrl)).complete(request()));
    expect(error).toMatchObject({ code: 'ModelRefused', class: 'pause' });
    expect(error.next).toContain('LONGHAUL_API_KEY');
  });

  it('removes a key that the endpoint repeats', async () => {
    const server = await serve([
      { error: { status: 403, body: { error: { message: `No: ${KEY}` } } } },
    ]);
    const error = await failure((await modelAt(server.baseUrl)).complete(request()));
    expect(error.message).toContain('[redacted');
  });

  it('lists what is served when the model is unknown', async () => {
    const server = await serve([{ text: 'ok' }], { model: 'org/served-model' });
    const error = await failure(
      (await modelAt(server.baseUrl, { name: 'other' })).complete(request()),
    );
    expect(error).toMatchObject({ code: 'ModelUnknown', class: 'usage' });
    expect(error.next).toContain('org/served-model');
    const named = await modelAt(server.baseUrl, { name: 'org/served-model' });
    expect((await named.complete(request())).message.content).toBe('ok');
  });

  it('points at the base URL when the path is wrong', async () => {
    const server = await serve([{ text: 'ok' }]);
    const wrong = server.baseUrl.replace('/v1', '');
    const error = await failure((await modelAt(wrong)).complete(request()));
    expect(error.code).toBe('ModelUnknown');
    expect(error.next).toContain('/v1');
  });

  it.each([
    [429, 'ModelOverloaded', 'retryable'],
    [503, 'ModelOverloaded', 'retryable'],
    [500, 'ModelUnreachable', 'retryable'],
    [408, 'ModelUnreachable', 'retryable'],
    [400, 'ModelRefused', 'pause'],
    [402, 'ModelRefused', 'pause'],
    [413, 'ContextTooLong', 'terminal'],
  ])('attributes status %i', async (status, code, cls) => {
    const server = await serve([{ error: { status } }]);
    const error = await failure((await modelAt(server.baseUrl)).complete(request()));
    expect(error).toMatchObject({ code, class: cls });
  });

  it.each([
    ["This model's maximum context length is 2048 tokens.", undefined, 'ContextTooLong'],
    ['prompt is too long: 210000 tokens > 200000 maximum', undefined, 'ContextTooLong'],
    ['the request exceeds the available context size', 'x', 'ContextTooLong'],
    ['too big', 'context_length_exceeded', 'ContextTooLong'],
    ['The model `x` does not exist.', undefined, 'ModelUnknown'],
    ['registry.example/x does not support tools', undefined, 'ModelRefused'],
  ])('reads a 400 that says "%s"', async (message, code, expected) => {
    const server = await serve([{ error: { status: 400, body: { error: { message, code } } } }]);
    const error = await failure((await modelAt(server.baseUrl)).complete(request()));
    expect(error.code).toBe(expected);
  });

  it('makes one attempt and passes on retry-after', async () => {
    const limited = { error: { status: 429, retryAfter: '7' } };
    const server = await serve([[limited, { text: 'ok' }]]);
    const model = await modelAt(server.baseUrl);
    const error = await failure(model.complete(request()));
    expect(error.retryAfterMs).toBe(7000);
    expect(server.count(0)).toBe(1);
    expect((await model.complete(request())).message.content).toBe('ok');
    expect(server.count(0)).toBe(2);
  });

  it('reads a date in retry-after', async () => {
    const retryAfter = new Date(Date.now() + 3_600_000).toUTCString();
    const server = await serve([{ error: { status: 503, retryAfter } }]);
    const error = await failure((await modelAt(server.baseUrl)).complete(request()));
    expect(error.retryAfterMs).toBeGreaterThan(3_000_000);
    expect(error.retryAfterMs).toBeLessThanOrEqual(3_600_000);
  });

  it('does not retry an exhausted account', async () => {
    const body = {
      error: { message: 'You exceeded your current quota', code: 'insufficient_quota' },
    };
    const server = await serve([{ error: { status: 429, body } }]);
    const error = await failure((await modelAt(server.baseUrl)).complete(request()));
    expect(error.class).toBe('pause');
  });

  it('leaves out a page that stands in for an error', async () => {
    const server = await serve([
      { error: { status: 502, body: '<html>Bad gateway, long page</html>' } },
    ]);
    const error = await failure((await modelAt(server.baseUrl)).complete(request()));
    expect(error.code).toBe('ModelUnreachable');
    expect(error.message).not.toContain('<html>');
  });

  it.each([0, 1, 4])('is retryable when the connection drops after %i chunks', async (chunks) => {
    const server = await serve([
      { text: 'A text that is long enough to be cut.', dropAfterChunks: chunks },
    ]);
    const error = await failure((await modelAt(server.baseUrl)).complete(request()));
    expect(error).toMatchObject({ code: 'ModelUnreachable', class: 'retryable' });
    expect(error.message).toContain(server.baseUrl);
  });

  it('is retryable when the server is killed in the middle', async () => {
    const server = await serve([{ text: 'word '.repeat(200), delayMs: 10 }]);
    const model = await modelAt(server.baseUrl);
    let closed: Promise<void> | undefined;
    const error = await failure(
      model.complete(request({ onText: () => void (closed ??= server.close()) })),
    );
    await closed;
    expect(error).toMatchObject({ code: 'ModelUnreachable', class: 'retryable' });
    expect((await failure(model.complete(request()))).code).toBe('ModelUnreachable');
  });

  it.each([
    ['JSON that is broken', ['data: {"choices": [\n\n', 'data: [DONE]\n\n']],
    ['another shape', ['data: {"choices": [{"delta": {"content": 5}}]}\n\n']],
    ['no finish', ['data: {"choices": [{"delta": {"content": "half"}}]}\n\n', 'data: [DONE]\n\n']],
    ['nothing at all', ['']],
    ['a page', ['<html>Welcome</html>']],
    [
      'a call without a name',
      [
        'data: {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]}\n\n',
        'data: {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}\n\n',
        'data: [DONE]\n\n',
      ],
    ],
  ])('is malformed when the stream holds %s', async (_, raw) => {
    const server = await serve([{ raw }]);
    const error = await failure((await modelAt(server.baseUrl)).complete(request()));
    expect(error).toMatchObject({ code: 'ModelMalformed', class: 'retryable' });
  });

  it.each([
    [{ message: 'Rate limit reached', code: 'rate_limit_exceeded' }, 'ModelOverloaded'],
    [{ message: 'The context size was exceeded', code: 400 }, 'ContextTooLong'],
    [{ message: 'Engine process died', code: 500 }, 'ModelUnreachable'],
    [{ message: 'Something broke', type: 'server_error' }, 'ModelUnreachable'],
  ])('reads an error inside the stream: %j', async (error, code) => {
    const server = await serve([
      { raw: [`data: ${JSON.stringify({ error })}\n\n`, 'data: [DONE]\n\n'] },
    ]);
    expect((await failure((await modelAt(server.baseUrl)).complete(request()))).code).toBe(code);
  });

  it('gives up on silence, before the first part and after it', async () => {
    const server = await serve([
      [
        { text: 'x', hangAfterChunks: 0 },
        { text: 'x', hangAfterChunks: 2 },
      ],
    ]);
    const model = await modelAt(server.baseUrl, { idleTimeoutMs: 200 });
    for (const _ of [0, 1]) {
      const error = await failure(model.complete(request()));
      expect(error).toMatchObject({ code: 'ModelUnreachable', class: 'retryable' });
      expect(error.message).toContain('silent');
    }
  });

  it('gives up on a server that takes the connection and never answers', async () => {
    const mute = createTcpServer(() => {});
    await new Promise<void>((resolve) => mute.listen(0, '127.0.0.1', resolve));
    const { port } = mute.address() as AddressInfo;
    const model = await modelAt(`http://127.0.0.1:${port}/v1`, { idleTimeoutMs: 200 });
    const error = await failure(model.complete(request()));
    expect(error.code).toBe('ModelUnreachable');
    mute.close();
  });

  it('a slow stream is not silence, but its whole time is limited', async () => {
    const server = await serve([{ text: 'word '.repeat(40), delayMs: 30 }]);
    const patient = await modelAt(server.baseUrl, { idleTimeoutMs: 600 });
    expect((await patient.complete(request())).message.content).toBe('word '.repeat(40));
    const hurried = await modelAt(server.baseUrl, { timeoutMs: 200 });
    expect((await failure(hurried.complete(request()))).code).toBe('ModelUnreachable');
  });

  it('aborts before and during a call', async () => {
    const server = await serve([{ text: 'word '.repeat(200), delayMs: 10 }]);
    const model = await modelAt(server.baseUrl);
    const early = await failure(model.complete(request({ signal: AbortSignal.abort() })));
    expect(early.code).toBe('Interrupted');
    const controller = new AbortController();
    const late = await failure(
      model.complete(request({ signal: controller.signal, onText: () => controller.abort() })),
    );
    expect(late.code).toBe('Interrupted');
  });

  it.each([
    [
      'chunks',
      `data: ${JSON.stringify({ choices: [{ delta: { content: 'x'.repeat(1 << 20) } }] })}\n\n`,
    ],
    ['one line', 'x'.repeat(1 << 20)],
  ])('cuts off an answer without end, in %s', async (_, piece) => {
    const endless = createHttpServer((_, response) => {
      response.writeHead(200, { 'content-type': 'text/event-stream' });
      const write = () => {
        while (!response.destroyed && response.write(piece));
        if (!response.destroyed) response.once('drain', write);
      };
      response.on('error', () => {});
      write();
    });
    await new Promise<void>((resolve) => endless.listen(0, '127.0.0.1', resolve));
    closers.push(
      () =>
        new Promise((resolve) => {
          endless.close(() => resolve());
          endless.closeAllConnections();
        }),
    );
    const { port } = endless.address() as AddressInfo;
    const error = await failure((await modelAt(`http://127.0.0.1:${port}/v1`)).complete(request()));
    expect(error.code).toBe('ModelMalformed');
    expect(error.message).toContain('cut off');
  });
});

async function freePort(): Promise<number> {
  const probe = createTcpServer();
  await new Promise<void>((resolve) => probe.listen(0, '127.0.0.1', resolve));
  const { port } = probe.address() as AddressInfo;
  await new Promise((resolve) => probe.close(resolve));
  return port;
}
