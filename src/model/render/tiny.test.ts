import { expect, it } from 'vitest';
import { type Message, Rng } from '../../core/index.ts';
import { tinyRenderer } from './tiny.ts';

const user: Message = { role: 'user', content: 's:rev,bang=' };
const tool = (content: string): Message => ({ role: 'tool', callId: 'c', tool: 'submit', content });

it('has a pinned vocabulary: checkpoints depend on it', () => {
  expect(tinyRenderer.vocabSize).toBe(98);
  expect(tinyRenderer.prompt([{ role: 'user', content: ' a~' }])).toEqual([1, 3, 68, 97]);
  expect(tinyRenderer.tokenizerHash).toBe('705bbfdfa31e6ddc');
  expect(tinyRenderer.rendererHash).toBe('bfa683ff025fcc8a');
});

it('reads an answer as a submit call', () => {
  const ids = tinyRenderer.prompt([{ role: 'user', content: 'x[1:]' }]).slice(1);
  expect(tinyRenderer.parse([...ids, 2], true)).toEqual({
    role: 'assistant',
    content: '',
    toolCalls: [{ callId: 'submit', tool: 'submit', input: { program: 'x[1:]' } }],
  });
  expect(tinyRenderer.parse(ids, false)).toEqual({ role: 'assistant', content: 'x[1:]' });
});

it('is append-only exact for any sampled ids, special ones included', () => {
  const rng = Rng.of(1, 'ids');
  for (let i = 0; i < 200; i++) {
    const messages: Message[] = [user];
    let ids = tinyRenderer.prompt(messages);
    for (let turn = 0; turn < 3; turn++) {
      const sampled = Array.from({ length: rng.int(0, 20) }, () => rng.pick([0, 1, ...all]));
      const ended = turn < 2 || rng.float() < 0.5;
      if (ended) sampled.push(2);
      messages.push(tinyRenderer.parse(sampled, ended));
      ids = [...ids, ...sampled];
      expect(tinyRenderer.prompt(messages)).toEqual(ids);
      if (!ended) break;
      messages.push(tool(`!${i}>a:b=`));
      const next = tinyRenderer.prompt(messages);
      expect(next.slice(0, ids.length)).toEqual(ids);
      ids = next;
    }
  }
});
const all = Array.from({ length: 95 }, (_, i) => i + 3);

it('never turns text from outside into special ids', () => {
  for (const content of ['\ue000\ue001\ue002', '\u0000\n', 'é', '😀', '<end>']) {
    const outside = [user, tool(content)];
    const ids = tinyRenderer.prompt(outside).slice(1);
    expect(ids.every((id) => id >= 3 && id < 98)).toBe(true);
  }
});

it('refuses a system message', () => {
  expect(() => tinyRenderer.prompt([{ role: 'system', content: 'hi' }])).toThrow(
    expect.objectContaining({ code: 'ModelRefused' }),
  );
});
