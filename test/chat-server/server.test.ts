import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { type Scenario, startChatServer } from './server.ts';

const user = { role: 'user', content: 'Go.' };
const assistant = { role: 'assistant', content: '' };

async function chat(baseUrl: string, messages: object[], more: object = {}): Promise<Response> {
  return await fetch(`${baseUrl}/chat/completions`, {
    method: 'POST',
    body: JSON.stringify({ model: 'scripted', messages, ...more }),
  });
}

describe('wire format', () => {
  it('answers in one piece', async () => {
    const server = await startChatServer({
      scenario: { turns: [{ toolCalls: [{ name: 'shell', arguments: { command: 'ls' } }] }] },
    });
    const body = await (await chat(server.baseUrl, [user])).json();
    expect(body).toMatchObject({
      object: 'chat.completion',
      choices: [
        {
          message: {
            role: 'assistant',
            content: null,
            tool_calls: [
              { id: 'call-0-0', function: { name: 'shell', arguments: '{"command":"ls"}' } },
            ],
          },
          finish_reason: 'tool_calls',
        },
      ],
      usage: { prompt_tokens: 10, completion_tokens: 5, total_tokens: 15 },
    });
    await server.close();
  });

  it('streams events whose arguments are split, and ends with [DONE]', async () => {
    const server = await startChatServer({
      scenario: { turns: [{ toolCalls: [{ name: 'shell', arguments: { command: 'ls -l' } }] }] },
    });
    const response = await chat(server.baseUrl, [user], {
      stream: true,
      stream_options: { include_usage: true },
    });
    expect(response.headers.get('content-type')).toBe('text/event-stream');
    const events = (await response.text())
      .split('\n\n')
      .filter(Boolean)
      .map((line) => line.slice('data: '.length));
    expect(events.at(-1)).toBe('[DONE]');
    const chunks = events.slice(0, -1).map((event) => JSON.parse(event));
    const deltas = chunks.flatMap(
      (chunk) => chunk.choices[0]?.delta.tool_calls?.[0].function.arguments ?? [],
    );
    expect(deltas.length).toBeGreaterThan(2);
    expect(deltas.join('')).toBe('{"command":"ls -l"}');
    expect(chunks.at(-1)).toMatchObject({ choices: [], usage: { total_tokens: 15 } });
    await server.close();
  });

  it('rejects what is not a chat request', async () => {
    const server = await startChatServer({ scenario: { turns: [{ text: 'x' }] } });
    const post = (body: string) =>
      fetch(`${server.baseUrl}/chat/completions`, { method: 'POST', body });
    expect((await post('{')).status).toBe(400);
    expect((await post('{"model":"scripted","messages":[]}')).status).toBe(400);
    expect((await chat(server.baseUrl, [user, assistant, user])).status).toBe(400);
    expect((await fetch(`${server.baseUrl}/nothing`)).status).toBe(404);
    expect(await (await fetch(`${server.baseUrl}/models`)).json()).toMatchObject({
      data: [{ id: 'scripted' }],
    });
    await server.close();
  });
});

describe('restarts', () => {
  let folder: string;
  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), 'chat-server-'));
  });
  afterAll(() => rm(folder, { recursive: true, force: true }));

  async function spawnServer(port: string): Promise<{ child: ChildProcess; baseUrl: string }> {
    const main = fileURLToPath(new URL('main.ts', import.meta.url));
    const files = ['--scenario', join(folder, 'scenario.json'), '--log', join(folder, 'log')];
    const child = spawn(process.execPath, [main, '--port', port, ...files], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    const [line] = await once(createInterface(child.stdout!), 'line');
    return { child, baseUrl: JSON.parse(line as string).baseUrl };
  }

  it('goes on with the right turn and counts after kill -9', async () => {
    const scenario: Scenario = {
      turns: [[{ text: 'first' }, { text: 'again' }], { text: 'second', delayMs: 200 }],
    };
    await writeFile(join(folder, 'scenario.json'), JSON.stringify(scenario));
    const content = async (response: Response) =>
      ((await response.json()) as { choices: { message: { content: string } }[] }).choices[0]!
        .message.content;

    const before = await spawnServer('0');
    expect(await content(await chat(before.baseUrl, [user]))).toBe('first');
    const cut = await chat(before.baseUrl, [user, assistant, user], { stream: true });
    before.child.kill('SIGKILL');
    await expect(cut.text()).rejects.toThrow();
    await once(before.child, 'exit');

    const after = await spawnServer(new URL(before.baseUrl).port);
    expect(await content(await chat(after.baseUrl, [user, assistant, user]))).toBe('second');
    expect(await content(await chat(after.baseUrl, [user]))).toBe('again');
    after.child.kill('SIGKILL');
    await once(after.child, 'exit');

    const counts = await startChatServer({ scenario, log: join(folder, 'log') });
    expect([counts.count(0), counts.count(1)]).toEqual([2, 2]);
    await counts.close();
  });
});
