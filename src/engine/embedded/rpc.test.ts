import { afterEach, describe, expect, it } from 'vitest';
import { WorkerClient } from './rpc.ts';

let client: WorkerClient;
afterEach(() => client.close());

describe('calls to a worker thread', () => {
  it('a thread that dies fails its open calls and every later one', async () => {
    client = new WorkerClient('no-such-module', 'ghost');
    const open = [client.call('a', null), client.call('b', null)];
    for (const call of open) await expect(call).rejects.toMatchObject({ code: 'EngineFailed' });
    await expect(client.call('c', null)).rejects.toThrow('ghost');
  });

  it('an unknown method is an error of that call only', async () => {
    client = new WorkerClient('trainer-worker', 'trainer');
    await expect(client.call('fly', null)).rejects.toThrow('no method fly');
    await expect(client.call('forward', [])).rejects.toThrow('not started');
    const config = { vocabSize: 2, dim: 0 };
    const started = client.call('start', { from: { config, seed: 1 }, options: { threads: 1 } });
    await expect(started).rejects.toMatchObject({ code: 'ConfigInvalid', next: /./ });
  });
});
