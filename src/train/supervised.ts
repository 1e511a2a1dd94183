import { type Message, Rng } from '../core/index.ts';
import type { AdamParams, Datum, Trainer } from '../engine/contract.ts';
import { drawTasks, TRIES } from '../env/programs/environment.ts';
import type { Language } from '../env/programs/operations.ts';
import { formatSpec } from '../env/programs/spec.ts';
import { demonstrate, type Turn } from '../env/programs/teacher.ts';
import { observation } from '../env/programs/verdict.ts';
import type { Renderer } from '../model/render/renderer.ts';
import { imitationDatum } from './datum.ts';

export interface SupervisedSettings {
  trainer: Trainer;
  renderer: Renderer;
  language: Language;
  seed: number;
  rows: number;
}

/**
 * One step of imitating the faulty teacher on training specs: cross-entropy on the characters of its
 * programs; specs and observations are masked. The data are a function of (seed, step).
 *
 * @returns mean loss a learned token, in nats
 */
export async function supervisedStep(
  settings: SupervisedSettings,
  step: number,
  learningRate: number,
): Promise<{ loss: number; gradNorm: number; tokens: number }> {
  const { trainer, renderer, language, seed, rows } = settings;
  const rng = Rng.of(seed, 'demonstrations', step);
  const data: Datum[] = drawTasks('train', rng.uint32(), rows).map((task) => {
    // Half the demonstrations are one try, since the first try is what later tries build on.
    const tries = rng.float() < 0.5 ? 1 : TRIES;
    const turns = demonstrate(rng, task.spec, task.cases, language, tries);
    return demonstrationDatum(renderer, `${formatSpec(task.spec)}=`, turns);
  });
  const tokens = data.reduce((sum, datum) => sum + datum.weights!.reduce((a, b) => a + b, 0), 0);
  const { lossSum } = await trainer.forwardBackward(data, { kind: 'cross_entropy' });
  const { gradNorm } = await trainer.optimStep(adam(learningRate, tokens));
  return { loss: lossSum / tokens, gradNorm, tokens };
}

/** The optimiser of both phases: gradients are means over tokens, clipped at norm 1. */
export function adam(learningRate: number, tokens: number): AdamParams {
  return {
    learningRate,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weightDecay: 0.01,
    gradClipNorm: 1,
    gradScale: 1 / tokens,
  };
}

/** The conversation that the environment would have had with the teacher, as tokens to imitate. */
function demonstrationDatum(renderer: Renderer, task: string, turns: readonly Turn[]): Datum {
  const messages: Message[] = [{ role: 'user', content: task }];
  let ids = renderer.prompt(messages);
  const learned = ids.map(() => false);
  const extend = (message: Message, learn: boolean) => {
    messages.push(message);
    ids = renderer.prompt(messages);
    while (learned.length < ids.length) learned.push(learn);
  };
  for (const [i, turn] of turns.entries()) {
    const call = { callId: 'submit', tool: 'submit' };
    const input = { program: turn.program };
    extend({ role: 'assistant', content: '', toolCalls: [{ ...call, input }] }, true);
    if (i < turns.length - 1)
      extend({ role: 'tool', ...call, content: observation(turn.verdict) }, false);
  }
  return imitationDatum(ids, learned);
}
