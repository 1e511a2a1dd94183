import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { startChatServer } from '../../test/chat-server/server.ts';
import { LonghaulError } from '../core/index.ts';
import { type ResolveOptions, resolveModel } from './resolve.ts';

async function refusal(options: Partial<ResolveOptions>): Promise<LonghaulError> {
  const error = await resolveModel({ ref: '', env: {}, ...options }).then(
    (model) => {
      throw new Error(`expected a refusal, got ${model.ref}`);
    },
    (thrown: unknown) => thrown,
  );
  expect(error).toBeInstanceOf(LonghaulError);
  expect(error).toMatchObject({ class: 'usage' });
  return error as LonghaulError;
}

const request = {
  messages: [{ role: 'user' as const, content: 'Go.' }],
  tools: [],
  maxOutputTokens: 10,
  sampling: { temperature: 0 },
};

describe('names', () => {
  it.each(['', 'model', '/model', 'anthropic/'])('refuses "%s"', async (ref) => {
    expect((await refusal({ ref })).next).toContain('PROVIDER/MODEL');
  });

  it('suggests the provider that was meant', async () => {
    const error = await refusal({ ref: 'antropic/some-model' });
    expect(error.message).toContain('antropic');
    expect(error.next).toContain('Did you mean anthropic?');
    expect((await refusal({ ref: 'zzzzzzzz/m' })).next).not.toContain('Did you mean');
  });

  it('wants a URL for an endpoint, and a proper one', async () => {
    expect((await refusal({ ref: 'openai-compatible/m' })).next).toContain('--base-url');
    const ref = 'openai-compatible/m';
    for (const baseUrl of ['localhost:8000', 'not a url', 'file:///etc/passwd']) {
      expect((await refusal({ ref, baseUrl })).next).toContain('http://');
    }
  });

  it('does not take or repeat a password in the URL', async () => {
    const baseUrl = 'http://user:hunter2-hunter2@127.0.0.1:1/v1';
    const error = await refusal({ ref: 'openai-compatible/m', baseUrl });
    expect(JSON.stringify(error)).not.toContain('hunter2');
  });
});

describe('endpoints', () => {
  it('uses any provider name with a base URL, names with slashes, and the first key that is set', async () => {
    const server = await startChatServer({
      scenario: { model: 'org/model/7b', apiKey: 'key-1', turns: [{ text: 'ok' }] },
    });
    const env = { LONGHAUL_API_KEY: '', OPENAI_API_KEY: 'key-1' };
    for (const provider of ['openai-compatible', 'vllm', 'my-own', 'anthropic', 'llama-cpp']) {
      const ref = `${provider}/org/model/7b`;
      const model = await resolveModel({ ref, baseUrl: `${server.baseUrl}/`, env });
      expect(model.ref).toBe(ref);
      expect((await model.complete(request)).message.content).toBe('ok');
    }
    await server.close();
  });

  it('sends no authorization without a key, and reads the URL from the environment', async () => {
    const server = await startChatServer({ scenario: { turns: [{ text: 'ok' }] } });
    const model = await resolveModel({
      ref: 'openai-compatible/scripted',
      env: { LONGHAUL_BASE_URL: server.baseUrl },
    });
    expect((await model.complete(request)).message.content).toBe('ok');
    await server.close();
  });
});

describe('provider packages', () => {
  let folder: string;
  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), 'providers-'));
    await writePackage(
      '@ai-sdk/anthropic',
      `import { createServer } from 'node:http';
       export const createAnthropic = ({ apiKey }) => (modelId) => ({
         specificationVersion: 'v3', provider: 'fixture', modelId, supportedUrls: {},
         async doGenerate() { throw new Error('not streamed'); },
         async doStream() {
           const usage = { inputTokens: { total: 3 }, outputTokens: { total: apiKey.length } };
           return { stream: new ReadableStream({ start(controller) {
             controller.enqueue({ type: 'stream-start', warnings: [] });
             controller.enqueue({ type: 'text-start', id: '0' });
             controller.enqueue({ type: 'text-delta', id: '0', delta: 'hi from ' + modelId });
             controller.enqueue({ type: 'text-end', id: '0' });
             controller.enqueue({ type: 'finish', finishReason: { unified: 'stop' }, usage });
             controller.close();
           } }) };
         },
       });`,
    );
    await writePackage('@ai-sdk/groq', 'export const somethingElse = 1;');
    await writePackage('@ai-sdk/xai', "import 'a-package-that-is-not-there';");
  });
  afterAll(() => rm(folder, { recursive: true, force: true }));

  async function writePackage(name: string, source: string): Promise<void> {
    const path = join(folder, 'node_modules', name);
    await mkdir(path, { recursive: true });
    const manifest = { name, version: '1.0.0', type: 'module', exports: './index.js' };
    await writeFile(join(path, 'package.json'), JSON.stringify(manifest));
    await writeFile(join(path, 'index.js'), source);
  }

  it('says what to install', async () => {
    const error = await refusal({ ref: 'anthropic/some-model' });
    expect(error.next).toContain('npm install @ai-sdk/anthropic');
  });

  it('says which key is missing', async () => {
    const error = await refusal({ ref: 'anthropic/some-model', folders: [folder] });
    expect(error.next).toContain('ANTHROPIC_API_KEY');
  });

  it('says when a package is broken or another one', async () => {
    const env = { GROQ_API_KEY: 'k', XAI_API_KEY: 'k' };
    const other = await refusal({ ref: 'groq/m', folders: [folder], env });
    expect(other.message).toContain('createGroq');
    const broken = await refusal({ ref: 'xai/m', folders: [folder], env });
    expect(broken.message).toContain('a-package-that-is-not-there');
  });

  it("loads one from a user's project and adapts an older specification", async () => {
    const model = await resolveModel({
      ref: 'anthropic/some/model',
      folders: [folder],
      env: { ANTHROPIC_API_KEY: 'four' },
    });
    expect(await model.complete(request)).toMatchObject({
      message: { role: 'assistant', content: 'hi from some/model' },
      finishReason: 'stop',
      usage: { inputTokens: 3, outputTokens: 4 },
    });
  });
});
