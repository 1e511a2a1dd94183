import { describe, expect, it } from 'vitest';
import { expectedSeconds, grpoRate, scheduleFor, warmupRate } from './schedule.ts';

describe('a schedule', () => {
  it('fits its time budget on the reference machine', () => {
    for (const minutes of [4, 5, 7, 10, 30]) {
      const schedule = scheduleFor(minutes, 'python');
      const { warmupStep, afterWarmup } = expectedSeconds(schedule);
      const seconds = schedule.warmup.steps * warmupStep + afterWarmup;
      expect(seconds).toBeLessThanOrEqual(minutes * 60 + 5);
      expect(seconds).toBeGreaterThan(minutes * 60 * 0.95);
    }
  });
  it('depends on nothing but its arguments', () => {
    expect(scheduleFor(7, 'python')).toEqual(scheduleFor(7, 'python'));
  });
  it('rates rise, fall, and end where they should', () => {
    const { warmup, grpo } = scheduleFor(7, 'python');
    expect(warmupRate(warmup, 0)).toBeCloseTo(warmup.learningRate / warmup.rampSteps);
    expect(warmupRate(warmup, warmup.rampSteps)).toBeCloseTo(warmup.learningRate);
    expect(warmupRate(warmup, warmup.steps)).toBeCloseTo(warmup.learningRate / 10);
    expect(grpoRate(grpo, 0)).toBe(grpo.learningRate);
    expect(grpoRate(grpo, grpo.steps)).toBe(0);
  });
});
