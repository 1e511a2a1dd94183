import { existsSync } from 'node:fs';
import { copyFile, mkdtemp, rm, truncate, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { z } from 'zod';
import type { Message } from '../core/index.ts';
import type { Model, ModelRequest } from './contract.ts';
import { llamaCppModel } from './llama-cpp.ts';

const folder = resolve(process.env.LONGHAUL_TEST_LLAMA ?? '.cache/llama');
const gguf = join(folder, 'SmolLM2-135M-Instruct.Q4_1.gguf');
const ready = existsSync(gguf) && existsSync(join(folder, 'node_modules/node-llama-cpp'));

const shell = {
  name: 'shell',
  description: 'Runs a shell command and returns what it prints.',
  input: z.object({ command: z.string().describe('The command line') }),
};

function request(more: Partial<ModelRequest> = {}): ModelRequest {
  return {
    messages: [{ role: 'user', content: 'List the files here with the shell tool.' }],
    tools: [shell],
    maxOutputTokens: 60,
    sampling: { temperature: 0 },
    ...more,
  };
}

describe('without the package', () => {
  it('says what to install', async () => {
    const model = llamaCppModel({ path: 'model.gguf' });
    await expect(model.complete(request())).rejects.toMatchObject({
      code: 'ConfigInvalid',
      next: expect.stringContaining('npm install node-llama-cpp@3.21.1'),
    });
    await model.close?.();
  });
});

describe.skipIf(!ready)(
  'a real model (skipped where `node test/setup-llama.ts` has not been run)',
  () => {
    let model: Model;
    beforeAll(() => {
      model = llamaCppModel({ path: gguf, folders: [folder], contextTokens: 1024, threads: 1 });
    });
    afterAll(() => model.close?.());

    it('calls a tool with arguments of its schema', async () => {
      const completion = await model.complete(request());
      expect(completion.finishReason).toBe('tool_calls');
      expect(completion.provenance).toBe('none');
      const { message } = completion;
      if (message.role !== 'assistant') throw new Error('not an assistant message');
      expect(message.toolCalls).toHaveLength(1);
      const call = message.toolCalls![0]!;
      expect(call.tool).toBe('shell');
      expect(shell.input.parse(call.input).command).not.toBe('');
      expect(completion.usage.inputTokens).toBeGreaterThan(50);
      expect(completion.usage.outputTokens).toBeGreaterThan(5);
    });

    it('reads results, and reuses the conversation so far', async () => {
      const first = await model.complete(request());
      if (first.message.role !== 'assistant') throw new Error('not an assistant message');
      const { callId } = first.message.toolCalls![0]!;
      const messages: Message[] = [
        ...request().messages,
        first.message,
        { role: 'tool', callId, tool: 'shell', content: 'a.txt\nb.txt' },
      ];
      const second = await model.complete(request({ messages }));
      expect(second.usage.cachedInputTokens).toBeGreaterThan(50);
      if (second.message.role !== 'assistant') throw new Error('not an assistant message');
      const ids = (second.message.toolCalls ?? []).map((call) => call.callId);
      expect(ids).not.toContain(callId);
    });

    it('streams plain text, and honours the limit and the seed', async () => {
      const ask = async (seed: number) => {
        const seen: string[] = [];
        const completion = await model.complete(
          request({
            messages: [{ role: 'user', content: 'Tell me a story.' }],
            tools: [],
            maxOutputTokens: 12,
            sampling: { temperature: 1, seed },
            onText: (text) => seen.push(text),
          }),
        );
        expect(completion.finishReason).toBe('length');
        expect(completion.usage.outputTokens).toBeLessThanOrEqual(12);
        expect(seen.length).toBeGreaterThan(1);
        expect(seen.join('')).toBe(completion.message.content);
        return completion.message.content;
      };
      const text = await ask(1);
      expect(await ask(1)).toBe(text);
      expect(await ask(2)).not.toBe(text);
    });

    it('aborts before and during a call, and goes on after it', async () => {
      const gone = model.complete(request({ signal: AbortSignal.abort() }));
      await expect(gone).rejects.toMatchObject({ code: 'Interrupted' });
      const controller = new AbortController();
      const cut = model.complete(
        request({ tools: [], signal: controller.signal, onText: () => controller.abort() }),
      );
      await expect(cut).rejects.toMatchObject({ code: 'Interrupted' });
      const after = await model.complete(request({ tools: [], maxOutputTokens: 3 }));
      expect(after.message.content).not.toBe('');
    });

    it('refuses a conversation that does not fit instead of dropping its start', async () => {
      const messages: Message[] = [{ role: 'user', content: 'word '.repeat(2000) }];
      await expect(model.complete(request({ messages }))).rejects.toMatchObject({
        code: 'ContextTooLong',
        class: 'terminal',
      });
    });

    it('says so when a file is missing, something else or cut short', async () => {
      const scratch = await mkdtemp(join(tmpdir(), 'gguf-'));
      const failure = (path: string) => {
        const broken = llamaCppModel({ path, folders: [folder], threads: 1 });
        return expect(broken.complete(request({ maxOutputTokens: 4 }))).rejects;
      };
      await failure(join(scratch, 'missing.gguf')).toMatchObject({ code: 'NotFound' });
      await failure(scratch).toMatchObject({ code: 'NotFound' });
      const other = join(scratch, 'other.gguf');
      for (const content of ['', '<html>', 'GGUF but not really one of them']) {
        await writeFile(other, content);
        await failure(other).toMatchObject({ code: 'ConfigInvalid' });
      }
      const short = join(scratch, 'short.gguf');
      await copyFile(gguf, short);
      await truncate(short, 20_000_000);
      await failure(short).toMatchObject({ code: 'EngineFailed' });
      await rm(scratch, { recursive: true });
    });
  },
);
